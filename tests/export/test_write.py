"""Writing an artifact: external weights if large, and the old one intact if anything fails."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from sbert_infer import Engine
from sbert_infer._util.files import StagedFile
from sbert_infer.artifact import open_artifact
from sbert_infer.errors import ArtifactError, CorruptError
from sbert_infer.export import write as save
from sbert_infer.export.cli import main
from sbert_infer.export.exporter import ExportOptions, export
from tests.models.checkpoints import TEXTS
from tests.models.graphs import run, tokens

MakeCheckpoint = Callable[..., Path]

SHORT = ExportOptions(max_length=8)  # few texts to compare
AGAIN = ExportOptions(max_length=8, force=True)

pytestmark = pytest.mark.usefixtures("traced")


@pytest.fixture(params=[False, True], ids=["one file", "with a data file"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the weights go to a file of their own, as those over 2 GB do."""
    if request.param:
        monkeypatch.setattr(save, "MAX_PROTOBUF_BYTES", 1000)
    return bool(request.param)


@pytest.fixture
def old(make_checkpoint: MakeCheckpoint, large: bool, tmp_path: Path) -> Path:
    """An artifact that is about to be replaced, in a folder of its own."""
    path = tmp_path / "out" / "model.onnx"
    path.parent.mkdir()
    export(make_checkpoint(), path, SHORT)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_weights_beside_the_model(
    make_checkpoint: MakeCheckpoint, export_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "MAX_PROTOBUF_BYTES", 1000)
    path = tmp_path / "model.onnx"
    manifest = export(make_checkpoint(), path, SHORT)
    data = tmp_path / "model.onnx.data"
    assert set(contents(tmp_path)) == {path.name, data.name}
    assert manifest == open_artifact(path).manifest
    assert [(file.name, file.size) for file in manifest.data_files] == [(data.name, data.stat().st_size)]
    assert path.stat().st_size < data.stat().st_size
    assert path.stat().st_mode == data.stat().st_mode
    plain = export_checkpoint()
    inputs = tokens(path, TEXTS)
    np.testing.assert_array_equal(run(path, inputs), run(plain, inputs))  # plain onnxruntime finds the weights too
    with Engine(path, on_truncate="ignore") as engine, Engine(plain) as other:
        other.max_seq_length = 8
        other.on_truncate = "ignore"
        np.testing.assert_array_equal(engine.encode(TEXTS), other.encode(TEXTS))


def test_tampered_weights_are_noticed(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "MAX_PROTOBUF_BYTES", 1000)
    path, data = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    export(make_checkpoint(), path, SHORT)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptError, match=r"model\.onnx\.data have changed"):
        Engine(path)
    data.write_bytes(content[:-1])
    with pytest.raises(CorruptError, match="bytes"):
        Engine(path)
    data.unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        Engine(path)


def test_replacing_leaves_only_the_new(old: Path, large: bool, make_checkpoint: MakeCheckpoint) -> None:
    before = contents(old.parent)
    export(make_checkpoint(), old, AGAIN)
    after = contents(old.parent)
    assert len(after) == len(before) == 1 + large
    assert set(after) == {"model.onnx", *(["model.onnx.2.data"] if large else [])}
    with Engine(old) as engine:
        assert np.isfinite(engine.encode("a text")).all()


def test_a_large_one_is_replaced_by_a_small_one(
    old: Path, large: bool, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "MAX_PROTOBUF_BYTES", 0 if not large else 2**31)
    export(make_checkpoint(), old, AGAIN)
    assert len(contents(old.parent)) == 1 + (not large)
    Engine(old).close()


def test_a_link_stays_a_link(old: Path, large: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    link = tmp_path / "link.onnx"
    link.symlink_to(old)
    export(make_checkpoint(), link, AGAIN)
    assert link.is_symlink()
    assert len(contents(old.parent)) == 1 + large
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["link.onnx"]
    Engine(old).close()


# -------------------------------------------------------------------------------------------------
# when it goes wrong


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Simulate a full disk: no file can grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("size", [0, 10_000, 100_000])
def test_full_disk(size: int, old: Path, large: bool, make_checkpoint: MakeCheckpoint) -> None:
    before = contents(old.parent)
    assert max(map(len, before.values())) > 100_000
    arguments = [str(make_checkpoint()), "-o", str(old), "--max-length", "8", "--force"]
    with largest_file(size):
        result = CliRunner().invoke(main, [*arguments, "--quiet"])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.output.splitlines() == [f"error: {old} can't be written: File too large"]
    assert contents(old.parent) == before


def test_full_disk_in_the_last_moment(
    old: Path, large: bool, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(old.parent)

    def fail(self: StagedFile) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StagedFile, "commit", fail)
    result = CliRunner().invoke(main, [str(make_checkpoint()), "-o", str(old), "--max-length", "8", "--force", "-q"])
    assert result.output.splitlines() == [f"error: {old} can't be written: No space left on device"]
    assert result.exit_code == 1
    assert contents(old.parent) == before


def test_interrupted(old: Path, large: bool, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(old.parent)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sbert_infer.export.families.sentence.certify", interrupt)
    result = CliRunner().invoke(main, [str(make_checkpoint()), "-o", str(old), "--max-length", "8", "--force", "-q"])
    assert result.exit_code == 130
    assert result.output.strip() == "stopped; what was not complete was not written"
    assert contents(old.parent) == before


# Runs the real command, but hangs before a given function, where it is killed. Each run is forked
# from a process that has imported everything, which takes seconds.
DRIVER = """
import json, os, sys, time
import onnx, onnx_ir as ir
from sbert_infer._util import files
from sbert_infer.export import cli, write as save
from sbert_infer.export.families import sentence

def run(model, moment, limit, *arguments):
    traced = ir.from_proto(onnx.load(model))
    sentence.convert = lambda *args, **options: traced
    save.MAX_PROTOBUF_BYTES = limit
    owner, name = {
        "verify": (sentence, "certify"),
        "write": (save, "_write_metadata"),
        "commit": (files.StagedFile, "commit"),
    }[moment]
    setattr(owner, name, stop)
    cli.main(arguments)

def stop(*args, **options):
    print(os.getpid(), flush=True)
    time.sleep(600)

for line in sys.stdin:
    if child := os.fork():
        print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    try:
        run(*json.loads(line))
    finally:
        os._exit(1)
"""

KillAt = Callable[[str, Path, int], None]


@pytest.fixture(scope="module")
def kill_at(make_checkpoint: MakeCheckpoint, graph_of: Callable[..., Path]) -> Iterator[KillAt]:
    """`kill_at("verify", target, limit)`: an export to `target`, killed when it gets there."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        stdin, stdout = driver.stdin, driver.stdout

        def kill(moment: str, target: Path, limit: int) -> None:
            options = ["-o", str(target), "--max-length", "8", "--force"]
            stdin.write(json.dumps([str(graph_of()), moment, limit, str(make_checkpoint()), *options]) + "\n")
            answer = stdout.readline()
            assert answer.strip().isdigit(), answer
            os.kill(int(answer), signal.SIGKILL)
            assert stdout.readline() == f"ended with {-signal.SIGKILL}\n"

        yield kill
        stdin.close()


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs unnamed files")
@pytest.mark.parametrize("moment", ["write", "verify", "commit"])
def test_killed(moment: str, make_checkpoint: MakeCheckpoint, kill_at: KillAt, tmp_path: Path) -> None:
    target = tmp_path / "model.onnx"
    export(make_checkpoint(), target, SHORT)
    before = contents(tmp_path)
    kill_at(moment, target, 2**31)
    assert contents(tmp_path) == before
    Engine(target).close()


@pytest.mark.parametrize("moment", ["verify", "commit"])
def test_what_a_killed_export_of_a_large_model_leaves_goes_with_the_next(
    moment: str, make_checkpoint: MakeCheckpoint, kill_at: KillAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "MAX_PROTOBUF_BYTES", 1000)
    target, data = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    export(make_checkpoint(), target, SHORT)
    before = {path.name: path.read_bytes() for path in (target, data)}
    kill_at(moment, target, 1000)
    assert {path.name: path.read_bytes() for path in (target, data)} == before
    Engine(target).close()
    assert len(list(tmp_path.iterdir())) > 2  # a folder beside it, and at worst the new weights
    export(make_checkpoint(), target, AGAIN)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.2.data"}
    Engine(target).close()


def test_an_export_that_still_runs_is_left_alone(
    make_checkpoint: MakeCheckpoint, traced: Callable[[], ir.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "MAX_PROTOBUF_BYTES", 1000)
    target = tmp_path / "model.onnx"
    manifest = export(make_checkpoint(), target, SHORT)
    with save.stage(traced(), manifest, "{}", target) as running:
        export(make_checkpoint(), target, AGAIN)
        assert open_artifact(running.path).tokenizer_json == "{}"
    assert len(list(tmp_path.iterdir())) == 2
    Engine(target).close()
