"""Real runs, independent of how fast the machine is."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbert_infer.artifact import open_artifact
from sbert_infer.bench import session
from sbert_infer.bench.contest.lineup import EAGER
from sbert_infer.bench.contest.models_under_test import ModelsUnderTest
from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.report.page import render_page
from sbert_infer.bench.report.results import Results, Row
from sbert_infer.bench.report.table import render_table
from sbert_infer.bench.session import Settings, run_session
from tests.bench.pages import Page

RETRIEVAL = ("nDCG@10", "recall@10", "recall@100", "MRR@10")


def row_of(results: Results, contestant: str, workload: str = "short") -> Row:
    return next(row for row in results.rows if (row.contestant, row.workload) == (contestant, workload))


def test_every_contestant_has_a_row_per_workload(real_run: Results) -> None:
    assert [facts.name for facts in real_run.workloads] == ["short", "mixed"]
    names = {row.contestant for row in real_run.rows}
    assert {EAGER, "sbert-infer fp32", "onnxruntime, plain", "fake wrong", "fake crash", "fake error"} <= names
    assert not any("sentence-transformers" in name for name in names)  # --only


@pytest.mark.parametrize("contestant", [EAGER, "sbert-infer fp32", "onnxruntime, plain", "onnxruntime, plain, tuned"])
def test_a_right_contestant_is_measured(real_run: Results, contestant: str) -> None:
    row = row_of(real_run, contestant)
    assert row.status == "ok", row.reason
    assert len(row.seconds) == 2
    assert row.texts_per_s is not None
    assert row.texts_per_s_low is not None
    assert row.texts_per_s_high is not None
    assert 0 < row.texts_per_s_low <= row.texts_per_s <= row.texts_per_s_high
    assert row.min_cosine is not None
    assert row.min_cosine > 0.99999
    for value in (row.speed_up, row.peak_share, row.cpu_s_per_1000, row.peak_mb, row.load_s, row.file_mb):
        assert value is not None
        assert value >= 0
    reference = row_of(real_run, EAGER).quality
    assert set(row.quality) == {"scored Spearman", *(f"tiny {name}" for name in RETRIEVAL)}
    assert row.quality == pytest.approx(reference, abs=5e-5)
    assert bool(row.latency_ms) == ("tuned" not in contestant)
    assert list(row.latency_ms.values()) == sorted(row.latency_ms.values())


def test_the_reference_is_the_measure(real_run: Results) -> None:
    assert row_of(real_run, EAGER).speed_up == 1
    assert real_run.ours_are_right


def test_wrong_vectors_are_shown_as_wrong_not_as_fast(real_run: Results) -> None:
    row = row_of(real_run, "fake wrong")
    assert row.status == "wrong"
    assert row.speed_up is None
    assert "fp32 needs 0.999" in row.reason
    assert real_run.of("short").index(row) > real_run.of("short").index(row_of(real_run, EAGER))


@pytest.mark.parametrize(("fault", "reason"), [("crash", "told to crash"), ("error", "told to fail")])
def test_a_contestant_that_dies_is_a_row(real_run: Results, fault: str, reason: str) -> None:
    for workload in ("short", "mixed"):
        row = row_of(real_run, f"fake {fault}", workload)
        assert row.status == "failed"
        assert reason in row.reason


def test_wrong_vectors_have_their_own_quality(real_run: Results) -> None:
    wrong, right = row_of(real_run, "fake wrong").quality, row_of(real_run, EAGER).quality
    assert set(wrong) == set(right)
    assert wrong != pytest.approx(right, abs=5e-5)
    assert row_of(real_run, "fake crash").quality == {}


def test_the_page_of_a_real_run(real_run: Results) -> None:
    assert Page(render_page(real_run)).open == []


def test_only_ours_decide_the_outcome(results: Results) -> None:
    assert results.ours_are_right
    next(row for row in results.rows if row.ours).status = "wrong"
    assert not results.ours_are_right


def workers_of(parent: int) -> list[int]:
    """List the live worker processes that `parent` started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, started_by = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            ours = b"worker.py" in (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        if ours and int(started_by) == parent and state != "Z":
            found.append(int(entry.name))
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@needs_proc
def test_no_worker_is_left(real_run: Results) -> None:
    assert workers_of(os.getpid()) == []


@needs_proc
@pytest.mark.parametrize(("number", "count"), [(signal.SIGINT, 3), (signal.SIGKILL, 1)])
def test_the_workers_end_with_the_command(
    make_checkpoint: Callable[..., Path], export_checkpoint: Callable[..., Path], number: signal.Signals, count: int
) -> None:
    """Interrupt it while it measures with all workers, and while the first one still imports."""
    command = [sys.executable, "-m", "sbert_infer.bench.cli", str(export_checkpoint("bert"))]
    options = ["--checkpoint", str(make_checkpoint("bert")), "--only", "sbert-infer", "--rounds", "1000"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE) as process:
        workers = wait_for(lambda: found if len(found := workers_of(process.pid)) == count else None)
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode != 0
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
    return value


def test_ctrl_c_keeps_what_was_measured(
    make_checkpoint: Callable[..., Path],
    export_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = ModelsUnderTest("tiny", str(make_checkpoint("bert")), (open_artifact(export_checkpoint("bert")),))
    look_around = functools.cache(lambda: real_look_around(models, Settings(), speed=True))  # takes seconds
    real_look_around = session._look_around
    monkeypatch.setattr(session, "_look_around", lambda *_, **__: look_around())

    def interrupted_at(when: str) -> Results:
        def progress(line: str) -> None:
            if line.startswith(when):
                raise KeyboardInterrupt

        workloads = {"first": ["a text", "b"], "second": ["c"]}
        return run_session(models, workloads, Settings(rounds=3, only=("sbert-infer",)), tmp_path, progress)

    results = interrupted_at("first: round 3 of 3, sbert-infer")
    assert {row.workload for row in results.rows} == {"first"}
    assert {len(row.seconds) for row in results.rows} == {2}
    assert "interrupted" in render_table(results)
    with pytest.raises(KeyboardInterrupt):
        interrupted_at("first: round 1")
    assert workers_of(os.getpid()) == []


def test_the_checkpoint_must_be_the_artifacts_own(
    make_checkpoint: Callable[..., Path], export_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    artifact = open_artifact(export_checkpoint("bert"))
    models = ModelsUnderTest("tiny", str(make_checkpoint("bert", seed=1)), (artifact,))
    with pytest.raises(BenchError, match="was not made from"):
        run_session(models, {"one": ["a text"]}, Settings(rounds=1), tmp_path)
