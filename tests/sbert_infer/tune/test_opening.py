"""`compute="auto"`: what `sbert-tune` has chosen; if that is void, the default and a warning."""

from __future__ import annotations

import asyncio
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sbert_infer import AsyncEngine, Engine, SbertInferWarning
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.backends import choice as choices
from sbert_infer.backends.choice import Choice, conditions, remember
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.cuda_packages import version
from sbert_infer.doctor.trial import try_artifact
from sbert_infer.embed.cli import main as embed
from sbert_infer.embed.write.origin import read_origin

COMMAND = "sbert-tune these --min-cosine 0.9"


@pytest.fixture
def exact(export_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact on a machine on which nothing was chosen."""
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copy(export_checkpoint("bert"), tmp_path / "model.onnx"))


@pytest.fixture
def int8(exact: Path, export_checkpoint: Callable[..., Path]) -> Path:
    """What was chosen in its place: the same in 8 bits, with one worker."""
    path = Path(shutil.copy(export_checkpoint("bert", int8=True), exact.with_name("model.int8.onnx")))
    remember(open_artifact(exact), chosen(path))
    return path


def chosen(path: Path) -> Choice:
    artifact = open_artifact(path)
    with Engine(artifact, workers=1, max_batch_tokens=300) as engine:
        runs = engine.info["backend"]
    return Choice(
        path=str(path),
        seal=artifact.sha256,
        model=fingerprint(artifact).model,
        device=None,
        workers=1,
        threads=None,
        max_batch_tokens=300,
        backend=runs,
        ratio=2.0,
        cosine=0.99,
        min_cosine=0.9,
        command=COMMAND,
        conditions=conditions(),
    )


@contextmanager
def warned(path: Path, why: str, command: str = COMMAND) -> Iterator[None]:
    """Expect one warning, of one line, that the default runs, why, and what to do."""
    with pytest.warns(SbertInferWarning) as found:
        yield
    (message,) = [str(each.message) for each in found]
    assert re.fullmatch(
        rf"{re.escape(str(path))} runs as by default, with onnxruntime .*: {why}; run: {command}", message
    )


def test_what_was_chosen_runs(exact: Path, int8: Path) -> None:
    with Engine(exact, compute="auto") as engine:
        info = engine.info
        assert (info["path"], info["precision"], info["workers"]) == (str(int8), "int8", 1)
        assert info["max_batch_tokens"] == 300
        assert info["compute"].startswith("model.int8.onnx with onnxruntime ")
        assert "300 tokens a batch: 2.00x the default, lowest cosine 0.990000 (0.9 was asked)" in info["compute"]
        with pickle.loads(pickle.dumps(engine)) as copy:  # noqa: S301
            assert copy.info == info
        engine.replace_backend().close()
    assert try_artifact(exact)["tuned"] in info["compute"]


def test_without_a_choice(exact: Path) -> None:
    with warned(exact, "sbert-tune has chosen nothing for this file on this machine", f"sbert-tune {exact}"):
        engine = Engine(exact, compute="auto")
    with engine:
        assert engine.info["precision"] == "fp32"
        assert engine.info["compute"].startswith("the default: sbert-tune has chosen nothing")
        assert try_artifact(exact)["tuned"] == engine.info["compute"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("usable_cores", 99, r"what sbert-tune chose is void: cores was \d+, and is 99"),
        ("cpu_quota", 0.5, r".* void: CPU quota was .*, and is 0\.5"),
        ("cpu_name", "Another", r".* void: CPU was .*, and is Another"),
    ],
)
def test_another_machine(
    exact: Path, int8: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, why: str
) -> None:
    monkeypatch.setattr(choices, name, lambda: value)
    with warned(exact, why):
        Engine(exact, compute="auto").close()


def test_another_version(exact: Path, int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "version", lambda name: "99.0" if name == "onnxruntime" else version(name))
    with warned(exact, r".* void: onnxruntime was [\d.]+, and is 99\.0"):
        Engine(exact, compute="auto").close()


def test_the_drivers_release_is_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "driver" not in conditions() or cuda.driver_problem() is None
    for name, value in (("driver_problem", None), ("device_count", 0), ("driver_release", "580.95.05")):
        monkeypatch.setattr(cuda, name, lambda value=value: value)
    assert conditions()["driver"] == "580.95.05"


def test_another_file(exact: Path, int8: Path, export_checkpoint: Callable[..., Path]) -> None:
    shutil.copy(export_checkpoint("bert", normalize=False), int8)
    with warned(exact, f"what sbert-tune chose is void: {int8.name} has changed"):
        Engine(exact, compute="auto").close()
    int8.write_bytes(int8.read_bytes()[:-9])
    with warned(exact, f"what sbert-tune chose, {int8.name}, can't be opened: its end is missing or damaged.*"):
        Engine(exact, compute="auto").close()
    int8.unlink()
    with warned(exact, f"what sbert-tune chose, {int8.name}, can't be opened: No such file or directory"):
        Engine(exact, compute="auto").close()
    shutil.copy(export_checkpoint("bert", normalize=False), exact)  # the choice was for another file
    with warned(exact, "sbert-tune has chosen nothing .*", f"sbert-tune {exact}"):
        Engine(exact, compute="auto").close()


def test_another_checkpoint_is_never_opened(exact: Path, export_checkpoint: Callable[..., Path], int8: Path) -> None:
    other = export_checkpoint("bert", normalize=False)
    remember(open_artifact(exact), chosen(other))
    with warned(exact, f"what sbert-tune chose is void: {other.name} has changed"):
        Engine(exact, compute="auto").close()


def test_another_backend(exact: Path, int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(open_artifact(exact), replace(chosen(int8), backend="OpenVINO"))
    with warned(exact, "what sbert-tune chose would run with onnxruntime .*, not OpenVINO"):
        Engine(exact, compute="auto").close()


def test_wrong_vectors(exact: Path, int8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OnnxBackend.run

    def spoilt(self: OnnxBackend, *args: Any, **options: Any) -> Any:
        found = run(self, *args, **options)
        return [rows[:, ::-1] for rows in found] if self.workers == 1 else found

    monkeypatch.setattr(OnnxBackend, "run", spoilt)
    monkeypatch.setattr("sbert_infer.backends.onnxruntime_cpu.usable_cores", lambda: 2)
    with warned(exact, f"what sbert-tune chose does not run: {int8}: .* gives wrong vectors here.*"):
        Engine(exact, compute="auto", verify="always").close()


def test_arguments(exact: Path, int8: Path) -> None:
    for options in ({"workers": 1}, {"device": "cpu"}, {"threads": 1}, {"max_batch_tokens": 9}):
        with pytest.raises(ValueError, match=f'{next(iter(options))} is chosen with compute="auto"'):
            Engine(exact, compute="auto", **options)
    wrong: Any = "fast"
    with pytest.raises(ValueError, match='compute must be "auto" or None'):
        Engine(exact, compute=wrong)
    with Engine(exact) as engine, pytest.raises(ValueError, match="an open engine has its compute"):
        AsyncEngine(engine, compute="auto")


def test_async_engine(exact: Path, int8: Path) -> None:
    async def run() -> None:
        async with AsyncEngine(exact, compute="auto") as engine:
            assert engine.engine.info["precision"] == "int8"
            assert (await engine.encode("a text")).shape == (32,)

    asyncio.run(run())


def test_embed(exact: Path, int8: Path) -> None:
    corpus, output = exact.with_name("corpus.txt"), exact.with_name("vectors.parquet")
    corpus.write_text("one text\nanother\n", encoding="utf-8")
    command = [str(corpus), str(exact), "-o", str(output), "--compute", "auto"]
    done = CliRunner().invoke(embed, command)
    assert done.exit_code == 0, done.output
    origin = read_origin(output)
    assert origin is not None
    assert origin.fingerprint == fingerprint(open_artifact(int8))
    for more in (["--workers", "1"], ["--device", "cpu"]):
        done = CliRunner().invoke(embed, [*command, "--force", *more])
        assert (done.exit_code, "--compute auto chooses" in done.stderr) == (2, True)
    remember(open_artifact(exact), replace(chosen(int8), backend="OpenVINO"))
    with pytest.warns(SbertInferWarning, match="not OpenVINO"):
        done = CliRunner().invoke(embed, [*command, "--force"])
    assert done.exit_code == 1
    assert "what sbert-tune chose does not run, and the default has other vectors" in done.stderr
