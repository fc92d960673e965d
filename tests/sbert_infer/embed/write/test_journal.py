"""A job that is killed, interrupted, out of disk space or changed, and the same command again."""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from sbert_infer._util.files import locked
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import _unseal, append_metadata
from sbert_infer.embed import local as command
from sbert_infer.embed.cli import main
from sbert_infer.embed.read.parts import Part
from sbert_infer.embed.write.journal import Journal

PART, PARTS = 4096, 10


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten parts of texts that repeat, which makes them quick, and some rows that are not text."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    rows = [b"caf\xe9" if n % 997 == 0 else f"text number {n % 211}".encode() for n in range(PARTS * PART)]
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(corpus: Path, small_onnx: Path) -> tuple[bytes, bytes]:
    """The output of a run that nothing disturbed, and its list of bad rows."""
    output = corpus.with_name("whole.parquet")
    assert Run(corpus, small_onnx, output).wait() == 0
    assert pq.read_metadata(output).num_rows + 42 == PARTS * PART
    return contents(output)


def contents(output: Path) -> tuple[bytes, bytes]:
    return output.read_bytes(), output.with_name(output.name + ".errors.jsonl").read_bytes()


class Run:
    """`sbert-embed` in a process of its own."""

    def __init__(self, corpus: Path, artifact: Path, output: Path, *, file_bytes: int | None = None) -> None:
        def limit() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        args = [corpus, artifact, "-o", output, "--part-rows", PART]
        self.parts = output.with_name(output.name + ".parts")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sbert_infer.embed.cli", *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )

    def wait(self) -> int:
        self.errors = self.process.communicate(timeout=120)[1]
        return self.process.returncode

    def wait_until(self, there: Callable[[Path], bool]) -> bool:
        """False if the process ended before."""
        while not there(self.parts):
            if self.process.poll() is not None:
                return False
            time.sleep(0.001)
        return True


def count_parts(folder: Path) -> int:
    return len(list(folder.glob("*.arrow")))


def test_killed_at_random_moments_the_result_is_the_same(
    tmp_path: Path, corpus: Path, small_onnx: Path, whole: tuple[bytes, bytes]
) -> None:
    rng = random.Random(1)  # noqa: S311
    output = tmp_path / "out.parquet"
    killed = 0
    for _ in range(3):
        run = Run(corpus, small_onnx, output)
        before = count_parts(run.parts)
        if run.wait_until(lambda folder, before=before: count_parts(folder) > before):  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.05))
        killed += run.process.poll() is None
        run.process.kill()
        run.wait()
    last = Run(corpus, small_onnx, output)
    last.wait_until(lambda folder: (folder / "finishing").exists())
    last.process.kill()
    last.wait()
    assert killed
    assert output.exists() or Run(corpus, small_onnx, output).wait() == 0
    if output.with_name("out.parquet.parts").exists():  # killed after the output was put in place
        assert Run(corpus, small_onnx, output).wait() == 0
    assert contents(output) == whole
    assert not output.with_name("out.parquet.parts").exists()


def test_a_slow_machine_saves_each_window(
    tmp_path: Path, corpus: Path, small_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are cut by time, too. The output is the same wherever they end."""
    saved: list[Part] = []
    append = Journal.append

    def count(journal: Journal, part: Part, *rest: Any) -> None:
        saved.append(part)
        append(journal, part, *rest)

    def run(name: str) -> tuple[int, bytes]:
        saved.clear()
        args = [corpus, small_onnx, "-o", tmp_path / name, "--columns", "", "--quiet"]
        main(list(map(str, args)), standalone_mode=False)
        return len(saved), (tmp_path / name).read_bytes()

    monkeypatch.setattr(Journal, "append", count)
    monkeypatch.setattr(command, "_SAVE_S", math.inf)
    few, output = run("a.parquet")
    monkeypatch.setattr(command, "_SAVE_S", 0.0)
    many, same = run("b.parquet")
    assert (few, many) == (3, 10)
    assert output == same


@pytest.mark.parametrize("file_bytes", [100_000, 1_000_000], ids=["at the first part", "at the output"])
def test_out_of_space_everything_so_far_is_kept(
    tmp_path: Path, corpus: Path, small_onnx: Path, whole: tuple[bytes, bytes], file_bytes: int
) -> None:
    """A limit on the size of files stands for a full disk."""
    output = tmp_path / "out.parquet"
    run = Run(corpus, small_onnx, output, file_bytes=file_bytes)
    assert run.wait() == 1
    assert run.errors == (
        f"error: no space left for {output}: make room in {tmp_path}, then run the same command again to go on\n"
    )
    assert count_parts(run.parts) == (0 if file_bytes == 100_000 else PARTS)
    assert not output.exists()
    assert Run(corpus, small_onnx, output).wait() == 0
    assert contents(output) == whole


def test_interrupted_it_says_how_to_go_on(
    tmp_path: Path, corpus: Path, small_onnx: Path, whole: tuple[bytes, bytes]
) -> None:
    output = tmp_path / "out.parquet"
    run = Run(corpus, small_onnx, output)
    assert run.wait_until(lambda folder: count_parts(folder) > 0)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "run the same command again to go on" in run.errors
    assert "Traceback" not in run.errors
    other = Run(corpus, small_onnx, output)
    assert other.wait() == 0
    assert contents(output) == whole


def test_interrupted_while_it_waits_for_standard_input(tmp_path: Path, small_onnx: Path) -> None:
    read, write = os.pipe()
    args = ["-", str(small_onnx), "-o", str(tmp_path / "out.npy"), "--part-rows", str(PART)]
    command = [sys.executable, "-m", "sbert_infer.embed.cli", *args]
    process = subprocess.Popen(command, stdin=read, stderr=subprocess.PIPE, text=True)
    os.write(write, b"one\n" * (2 * PART + 1))  # the second window starts the first part's way to the disk
    while not (tmp_path / "out.npy.parts" / "000000.arrow").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    os.close(write)
    assert process.returncode == 130
    assert "Fatal" not in errors


@pytest.fixture
def unfinished(tmp_path: Path, small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs `sbert-embed` on a job that has all its parts, but whose output could not be written."""
    corpus = tmp_path / "in.txt"
    corpus.write_text("one\ntwo\nthree\n")
    (tmp_path / "model.onnx").write_bytes(small_onnx.read_bytes())

    def run(*options: str) -> tuple[int, str]:
        args = [str(corpus), str(tmp_path / "model.onnx"), "-o", str(tmp_path / "out.npy"), *options]
        result = CliRunner().invoke(main, args)
        return result.exit_code, result.output

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(command, "write_output", no_space)
        assert run()[0] == 1
    assert count_parts(tmp_path / "out.npy.parts") == 1
    return run


Unfinished = Callable[..., tuple[int, str]]


def test_the_same_command_goes_on(unfinished: Unfinished) -> None:
    code, output = unfinished()
    assert code == 0
    assert "3 texts were done before" in output


def test_changed_options_are_refused(unfinished: Unfinished) -> None:
    code, output = unfinished("--normalize")
    assert code == 1
    assert "belongs to another job: normalize was False, now True" in output
    assert "begin again with --restart" in output
    assert unfinished("--normalize", "--restart")[0] == 0


def test_a_changed_input_is_refused(unfinished: Unfinished, tmp_path: Path) -> None:
    with (tmp_path / "in.txt").open("a") as file:
        file.write("four\n")
    code, output = unfinished()
    assert code == 1
    assert f"input {tmp_path / 'in.txt'} has changed" in output
    assert unfinished("--restart")[0] == 0


def test_a_changed_artifact_is_refused(unfinished: Unfinished, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    artifact, content = open_artifact(path), path.read_bytes()
    _, offset, _ = _unseal(memoryview(content))
    with path.open("w+b") as file:
        file.write(content[:offset])
        append_metadata(file, replace(artifact.manifest, name="another"), artifact.tokenizer_json)
    code, output = unfinished()
    assert code == 1
    assert "the artifact has changed (sha256 " in output


def test_a_damaged_part_is_refused(unfinished: Unfinished, tmp_path: Path) -> None:
    (tmp_path / "out.npy.parts" / "000000.arrow").write_bytes(b"x")
    code, output = unfinished()
    assert code == 1
    assert "000000.arrow is damaged: begin again with --restart" in output


def test_two_processes_do_not_share_a_job(unfinished: Unfinished, tmp_path: Path) -> None:
    with locked(tmp_path / "out.npy.parts" / "lock"):
        code, output = unfinished()
    assert code == 1
    assert "another process is at work" in output


def test_standard_input_must_bring_the_same_rows_again(tmp_path: Path, small_onnx: Path) -> None:
    args = ["-", str(small_onnx), "-o", str(tmp_path / "out.npy"), "--part-rows", "4096", "--on-error", "fail"]
    good = b"".join(b"text %d\n" % (n % 50) for n in range(5000))

    def run(stdin: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "sbert_infer.embed.cli", *args]
        return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=60)

    assert run(good + b"\xff\n").returncode == 1  # after the first part
    assert count_parts(tmp_path / "out.npy.parts") == 1
    other = run(good.replace(b"text 7\n", b"text x\n"))
    assert other.returncode == 1
    assert b"standard input is not what it was: its first 4,096 rows differ" in other.stderr
    done = run(good)
    assert done.returncode == 0
    assert b"4,096 texts were done before" in done.stdout
