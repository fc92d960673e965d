"""Whole runs of `sbert-bench --serve` against doubles of servers: counts, files, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.load.cli import load
from sbert_infer.bench.load.results import LONE, SATURATION, LoadResults
from sbert_infer.bench.load.schedule import parse_levels
from sbert_infer.bench.load.server import LoadServer, LoadSettings
from sbert_infer.bench.load.session import run_load
from sbert_infer.bench.load.target import memory_mb, parse_target
from sbert_infer.serve.settings import ModelFile, Settings
from tests.bench.pages import Page
from tests.doubles.openai import OpenAIDouble, running
from tests.sbert_infer.serve.conftest import start

TEXTS = [f"text number {number}" for number in range(12)]
QUICK = ["--rounds", "1", "--duration", "0.3", "--clients", "8", "--num-texts", "12", "--workload", "short"]


@pytest.fixture
def double() -> Iterator[OpenAIDouble]:
    with running(OpenAIDouble(service_s=0.005)) as server:
        yield server


def settings(levels: str = "50%", **more: Any) -> LoadSettings:
    short = {"rounds": 1, "duration_s": 0.3, "warm_up_s": 0.1, "watch_s": 1.0, "clients": 8}
    return LoadSettings(**{"levels": parse_levels(levels), **short, **more})


def load_of(double: OpenAIDouble, **more: Any) -> LoadResults:
    return run_load([parse_target(f"it={double.url}")], "texts", TEXTS, settings(**more))


def command(*arguments: str) -> Result:
    return CliRunner().invoke(load, list(arguments))


def test_all_levels_are_measured_and_add_up(double: OpenAIDouble) -> None:
    results = load_of(double, levels="50%,90%", sizes=(1, 3), rounds=2)
    assert [row.level for row in results.rows] == [LONE, SATURATION, "50%", "90%"]
    for row in results.rows:
        assert row.sent == row.answered == row.right
        assert (row.refused, row.errors, row.wrong_texts) == (0, {}, 0)
        assert len(row.goodput_rounds) == 2
        assert row.latency_ms["p50"] <= row.latency_ms["p95"] <= row.latency_ms["p99"] <= row.latency_ms["max"]
        assert row.latency_ms["p50"] >= 5  # the double's service time
        assert row.texts_per_s > row.goodput_per_s  # up to three texts in each
    most = results.row("it", SATURATION)
    assert most is not None
    assert most.answered_per_s <= 200  # 5 ms each, one at a time
    assert results.p99_bound_ms == pytest.approx(4 * results.rows[0].latency_ms["p99"])


def test_servers_take_turns_in_an_order_that_rotates(double: OpenAIDouble) -> None:
    targets = [parse_target(f"{name}={double.url}") for name in "ab"]
    lines: list[str] = []
    run_load(targets, "texts", TEXTS, settings(rounds=2, duration_s=0.1), progress=lines.append)
    turns = [line for line in lines if line.startswith("round ")]
    assert turns == [
        f"round {number} of 2, {what}, {name}"
        for number, names in ((1, "ab"), (2, "ba"))
        for what in ("lone", "saturation", "load 50%")  # what is compared is measured close together
        for name in names
    ]


def test_an_overloaded_server_that_refuses(double: OpenAIDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.bench.load.server._USUAL", 1000)  # speed does not matter here
    double.max_queue = 10
    results = load_of(double, levels="20x", duration_s=0.5, watch_s=3.0)  # certainly too much
    row = results.row("it", "20x")
    assert row is not None
    assert row.refused > 0
    assert row.answered > 0
    assert row.refused + row.answered == row.sent
    assert row.refusal_ms["max"] > 0
    assert row.watched_s == 3
    assert row.recovery_s is not None


def test_an_overload_that_only_queues_times_out(double: OpenAIDouble) -> None:
    results = load_of(double, levels="30x", timeout_s=0.3)
    row = results.row("it", "30x")
    assert row is not None
    assert row.errors["timeout"] > 0
    assert row.answered + sum(row.errors.values()) == row.sent  # every request is counted
    assert row.latency_ms["max"] >= 50  # queued behind others
    assert (row.watched_s, row.recovery_s) == (1, None)  # abandoned requests still keep it busy


def test_no_server_is_measured_while_another_is_busy(double: OpenAIDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    for name in ("wait_until_calm", "closed_turn", "open_turn"):
        method = getattr(LoadServer, name)

        def noting(self: LoadServer, *, name_: str = name, method: Any = method, **arguments: Any) -> None:
            happened.append(f"{name_} {self.target.name}")
            method(self, **arguments)

        monkeypatch.setattr(LoadServer, name, noting)
    with running(OpenAIDouble()) as other:
        targets = [parse_target(f"one={double.url}"), parse_target(f"two={other.url}")]
        run_load(targets, "texts", TEXTS, settings())
    turns = [place for place, what in enumerate(happened) if "turn" in what]
    assert len(turns) == 6
    for place in turns:
        assert happened[place - 2 : place] == ["wait_until_calm one", "wait_until_calm two"]


@pytest.mark.parametrize("fault", ["wrong_every", "nan_every"])
def test_wrong_vectors_are_counted_and_are_no_goodput(double: OpenAIDouble, fault: str) -> None:
    started = False

    def progress(line: str) -> None:
        nonlocal started
        if "round 1" in line and not started:  # after each text was sent alone
            started = True
            setattr(double, fault, 4)
            double.requests = 0

    results = run_load([parse_target(double.url)], "texts", TEXTS, settings(), progress=progress)
    measured = sum(row.sent for row in results.rows)
    calm = double.requests - measured  # requests that check whether the server is calm
    assert 5 <= calm <= 15
    assert (measured - calm) // 4 <= results.wrong_texts <= double.requests // 4
    for row in results.rows:
        assert row.right == row.answered - row.wrong_texts


def test_texts_that_a_server_refuses_are_left_out_and_said_so(double: OpenAIDouble) -> None:
    double.longest = len("text number 9")
    results = load_of(double)
    assert (results.stamp["texts"], results.stamp["texts_left_out"]) == (10, 2)
    assert all(row.right == row.sent for row in results.rows)
    double.longest = 3
    with pytest.raises(BenchError, match=r"refuses every text: HTTP 400: text 0 is too long"):
        load_of(double)


def test_ctrl_c_keeps_what_was_measured(double: OpenAIDouble) -> None:
    def interrupted_at(when: str) -> LoadResults:
        def progress(line: str) -> None:
            if line.startswith(when):
                raise KeyboardInterrupt

        return run_load([parse_target(f"it={double.url}")], "texts", TEXTS, settings("30%,60%"), progress=progress)

    results = interrupted_at("round 1 of 1, load 60%")
    assert [row.level for row in results.rows] == [LONE, SATURATION, "30%"]
    assert "interrupted" in results.stamp
    with pytest.raises(KeyboardInterrupt):
        interrupted_at("round 1 of 1, saturation")


# Connections that a run with 8 clients opens before its first level: each text alone, warming up,
# calm, lone, calm, saturation, calm.
BEFORE_LEVELS = 1 + 8 + 1 + 1 + 1 + 8 + 1


def test_a_signal_in_the_middle_of_a_turn(double: OpenAIDouble, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    rates = ",".join(f"{percent}%" for percent in range(20, 80))  # a minute of turns, to be cut short
    arguments = ["--serve", double.url, *QUICK, "--rates", rates, "--duration", "1", "--json", str(file)]
    process = subprocess.Popen(
        [sys.executable, "-m", "sbert_infer.bench.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while double.connections < BEFORE_LEVELS + 4:
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints.decode()
    assert b"interrupted" in output
    assert {row["level"] for row in json.loads(file.read_text())["rows"]} >= {LONE, SATURATION}


# The command --------------------------------------------------------------------------------------


def test_two_servers_take_turns_and_are_compared(double: OpenAIDouble, tmp_path: Path) -> None:
    page, data = tmp_path / "load.html", tmp_path / "load.json"
    with running(OpenAIDouble(service_s=0.02)) as slow:
        done = command(
            f"quick <1>={double.url}",
            f"slow={slow.url}/v1",
            *QUICK,
            *("--rates", "30%,60%,1.2x", "--html", str(page), "--json", str(data)),
        )
    assert done.exit_code == 0, done.output
    assert re.search(r"quick <1> against slow: \d+\.\d\dx the correct responses", done.output)
    results = json.loads(data.read_text(encoding="utf-8"))
    assert [server["name"] for server in results["servers"]] == ["quick <1>", "slow"]
    for name in ("quick <1>", "slow"):
        levels = [row["level"] for row in results["rows"] if row["server"] == name]
        assert levels == [LONE, SATURATION, "30%", "60%", "1.2x"]
    html = Page(page.read_text(encoding="utf-8"))
    assert html.open == []
    assert json.loads(html.script) == results
    kinds = [attributes.get("class") or "" for tag, attributes in html.tags if tag == "path"]
    assert [kind for kind in kinds if kind.startswith("saturation")] == ["saturation s0", "saturation s1"]
    for server in ("s0", "s1"):
        assert [kind for kind in kinds if kind.startswith(f"curve {server}")][:3] == [
            f"curve {server} p{rank}" for rank in (50, 95, 99)
        ]
    assert not re.search(r"https?://(?!127\.0\.0\.1)|@import|url\((?!#)", page.read_text(encoding="utf-8"))


def test_wrong_vectors_make_the_command_fail(double: OpenAIDouble) -> None:
    double.wrong_every = 5
    done = command(double.url, *QUICK, "--rates", "50%")
    assert done.exit_code == 1
    assert re.search(r"wrong vectors +[1-9][\d,]* +0 +MISSED", done.output)


def test_a_real_server_gives_the_vectors_of_its_artifact(
    export_checkpoint: Callable[..., Path], double: OpenAIDouble
) -> None:
    artifact = export_checkpoint("bert")
    server = start(Settings(models=(ModelFile(artifact, "small"),), port=0))
    try:
        done = command(str(artifact), server.url, *QUICK, "--rates", "50%", "--inputs-per-request", "1-4")
    finally:
        server.stop()
    assert done.exit_code == 0, done.output
    assert "of the speed without a server" in done.output
    done = command(str(artifact), double.url, *QUICK, "--rates", "50%")  # does not know this model
    assert done.exit_code == 1
    assert re.search(r"most correct responses +0\.0 requests/s", done.output)


def errors_of(output: str) -> list[str]:
    """The lines of the output but for the progress that a log shows."""
    return [line for line in output.splitlines() if not line.startswith("waiting for ")]


def test_an_api_key_is_taken_from_the_environment(double: OpenAIDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    double.key = "secret"
    done = command(double.url, *QUICK, "--rates", "50%")
    assert (done.exit_code, errors_of(done.output)) == (1, done.output.splitlines()[-1:])
    assert "set --api-key or OPENAI_API_KEY" in done.output
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    done = command(double.url, *QUICK, "--rates", "50%", "--encoding-format", "float", "--markdown")
    assert done.exit_code == 0, done.output
    assert "| level | offered/s |" in done.output
    assert "secret" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.onnx"], "--serve needs a URL such as"),
        (["http://127.0.0.1:9"], "is it running"),
        (["missing.onnx", "http://127.0.0.1:9"], "missing.onnx does not exist"),
        (["a.onnx", "b.onnx", "http://127.0.0.1:9"], "one artifact or checkpoint"),
        (["http://127.0.0.1:9", "--rates", "fast"], "--rates"),
        (["http://127.0.0.1:9", "http://127.0.0.1:9/v1"], "two servers have one name"),
        (["http://127.0.0.1:9", "--pid", "1", "--pid", "2"], "--pid was given 2 times for 1 servers"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 1
    (error,) = errors_of(done.output)
    assert error.startswith("error: ")
    assert message in error


def test_a_server_that_is_still_starting_is_waited_for() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # not listening yet
        target = parse_target(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(BenchError, match="is it running"):
            target.wait(0)
        timer = threading.Timer(0.3, listener.listen)
        timer.start()
        target.wait(60)
        timer.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_that_of_a_process_and_its_children() -> None:
    before = memory_mb(os.getpid())
    hog = "b = bytearray(300_000_000); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert memory_mb(os.getpid()) > before + 250
        child.kill()
    with pytest.raises(BenchError, match="no such process"):
        memory_mb(2**31 - 1)


def test_help_shows_examples() -> None:
    arguments = [sys.executable, "-m", "sbert_infer.bench.cli", "--serve", "--help"]
    done = subprocess.run(arguments, capture_output=True, encoding="utf-8", check=True)
    assert "sbert-bench model.onnx --serve http://127.0.0.1:8080" in done.stdout
    assert "Usage: sbert-bench --serve " in done.stdout
