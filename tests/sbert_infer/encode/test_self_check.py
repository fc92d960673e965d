"""Wrong vectors are noticed where they are made: once for each artifact, backend and machine."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbert_infer import Engine, Reranker, SbertInferWarning, WrongVectorsError
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import append_metadata
from sbert_infer.backends import select
from sbert_infer.backends.base import Batch
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.backends.onnxruntime_session import FileModel
from sbert_infer.backends.openvino_install import why_no_bf16
from sbert_infer.backends.tensorrt.backend import TensorRTBackend
from sbert_infer.encode import self_check
from sbert_infer.encode.self_check import bounds_of
from tests.models.multi_vectors import export_multi_vector
from tests.models.sparse_encoders import splade_onnx


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start as on a new machine."""
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(self_check, "_seen", {})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every batch that runs on the CPU."""
    seen: list[int] = []
    run = OnnxBackend.run

    def counted(self: OnnxBackend, batch: Batch, *args: Any, **options: Any) -> Any:
        seen.append(len(batch.ids))
        return run(self, batch, *args, **options)

    monkeypatch.setattr(OnnxBackend, "run", counted)
    return seen


def rewritten(path: Path, target: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    """Write `path` again with a changed graph, under a seal that fits."""
    artifact, model = open_artifact(path), onnx.load(path)
    change(model)
    del model.metadata_props[:]
    target.write_bytes(model.SerializeToString())
    with target.open("r+b") as file:
        append_metadata(file, artifact.manifest, artifact.tokenizer_json)
    return target


def change_one_weight(model: onnx.ModelProto) -> None:
    """Change one number of the largest matrix of a layer."""
    matrices = [each for each in model.graph.initializer if len(each.dims) == 2 and each.dims[0] < 5000]
    chosen = max(matrices, key=lambda each: each.dims[0] * each.dims[1])
    values = numpy_helper.to_array(chosen).copy()
    values[3, 5] += 20 * np.abs(values).max()
    chosen.CopyFrom(numpy_helper.from_array(values, chosen.name))


def verdict(path: Path, opener: type[Engine] | type[Reranker] = Engine, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plan without a GPU
        with opener(path, **options) as engine:
            found: dict[str, Any] = engine.info["verified"]
            return found


NO_BF16 = pytest.mark.skipif(why_no_bf16() is not None, reason=f"{why_no_bf16()}")
HOWS = [{}, {"int8": True}, {"fp16": True}, {"portable": True}, pytest.param({"bf16": True}, marks=NO_BF16)]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("threads", [1, 2])
def test_no_false_alarm(export_checkpoint: Callable[..., Path], how: dict[str, Any], threads: int) -> None:
    found = verdict(export_checkpoint("bert", **how), threads=threads, verify="always")
    assert (found["verdict"], found["texts"]) == ("right", 32)
    assert found["found"] >= found["bound"]


def test_no_false_alarm_for_other_kinds(once: Callable[..., Path], reranker_onnx: Path) -> None:
    assert verdict(reranker_onnx, Reranker)["verdict"] == "right"
    for path in (export_multi_vector(once)[1], splade_onnx(once), splade_onnx(once, int8=True)):
        found = verdict(path)
        assert found["verdict"] == "right"
        assert found["texts"] > 1


def test_minilm_is_right_within_a_millionth(minilm_onnx: Path) -> None:
    found = verdict(minilm_onnx)
    assert found["verdict"] == "right"
    assert found["found"] > 1 - 1e-6


def test_one_changed_weight_is_noticed(minilm_onnx: Path, small_onnx: Path, tmp_path: Path) -> None:
    for path in (minilm_onnx, small_onnx):
        changed = rewritten(path, tmp_path / path.name, change_one_weight)
        with pytest.raises(WrongVectorsError) as raised:
            Engine(changed)
        message = str(raised.value)
        assert str(changed) in message
        assert "lowest cosine" in message
        assert "\n" not in message
        Engine(changed, verify="never").close()


def test_lengths_count(export_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = export_checkpoint("bert", normalize=True)
    artifact = open_artifact(path)
    entries = {**(artifact.manifest.canaries or {})}
    entries["scale"] *= 2
    with pytest.raises(WrongVectorsError, match=r"difference in length 0\.5"):
        Engine(replace(artifact, manifest=replace(artifact.manifest, canaries=entries), sha256="other"))


def test_a_reranker_is_checked_by_its_scores(reranker_onnx: Path, tmp_path: Path) -> None:
    changed = rewritten(reranker_onnx, tmp_path / "changed.onnx", change_one_weight)
    with pytest.raises(WrongVectorsError, match="difference of a score"):
        Reranker(changed)


def test_it_runs_once(small_onnx: Path, runs: list[int]) -> None:
    with Engine(small_onnx) as engine:
        first = len(runs)
        assert sum(runs) == 32 + 8  # together, and some of them alone
        engine.replace_backend().close()
        with copy.copy(engine) as other, Engine(small_onnx) as again:
            assert other.info["verified"] == again.info["verified"] == engine.info["verified"]
        assert len(runs) == first
    Engine(small_onnx, verify="never").close()
    assert len(runs) == first
    Engine(small_onnx, verify="always").close()
    assert len(runs) == 2 * first


def test_another_process_knows_the_verdict(small_onnx: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys; from sbert_infer import Engine; "
        "from sbert_infer.encode.self_check import SelfCheck; "
        "SelfCheck._run = lambda *_: sys.exit('it ran again'); "
        "print(json.dumps(Engine(sys.argv[1]).info['verified']))"
    )
    command = [sys.executable, "-c", code, str(small_onnx)]
    assert "it ran again" in subprocess.run(command, capture_output=True, encoding="utf-8").stderr
    here = verdict(small_onnx)
    there = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert json.loads(there.stdout) == here


def test_an_unwritable_cache_is_silent(
    small_onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(small_onnx).close()
        first = len(runs)
        Engine(small_onnx).close()
    assert len(runs) == first > 0  # this process remembers
    assert not caplog.records


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_wrong(
    small_onnx: Path, reranker_onnx: Path, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    run = OnnxBackend.run

    def spoiled(*args: Any, **options: Any) -> Any:
        found = [rows.copy() for rows in run(*args, **options)]
        found[0][0] = number
        return found

    monkeypatch.setattr(OnnxBackend, "run", spoiled)
    for opener, path in ((Engine, small_onnx), (Reranker, reranker_onnx)):
        with pytest.raises(WrongVectorsError, match=r"onnxruntime .*NaN or infinity.*sbert-verify") as raised:
            opener(path)
        assert str(path) in str(raised.value)


def test_an_artifact_without_canaries_opens(small_onnx: Path) -> None:
    artifact = open_artifact(small_onnx)
    with Engine(replace(artifact, manifest=replace(artifact.manifest, canaries=None))) as engine:
        assert engine.info["verified"]["verdict"] == "no canaries"


def test_an_unknown_value_is_refused(small_onnx: Path) -> None:
    with pytest.raises(ValueError, match="once, always, never"):
        Engine(small_onnx, verify="sometimes")  # type: ignore[arg-type]


@pytest.fixture
def bf16_onnx(small_onnx: Path, tmp_path: Path) -> Path:
    """A file that says that it is in BF16, so that it has two backends: OpenVINO, and another."""
    artifact, path = open_artifact(small_onnx), tmp_path / "bf16.onnx"
    path.write_bytes(small_onnx.read_bytes())
    with path.open("r+b") as file:
        model = onnx.load(small_onnx)
        del model.metadata_props[:]
        file.truncate()
        file.write(model.SerializeToString())
        append_metadata(file, replace(artifact.manifest, precision="bf16"), artifact.tokenizer_json)
    return path


@pytest.fixture
def wrong_openvino(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let OpenVINO run, and add the same to every vector."""
    opened: list[Any] = []

    class Wrong(OnnxBackend):
        closed = False

        def run(self, *args: Any, **options: Any) -> Any:
            return [found + 1 for found in super().run(*args, **options)]

        def describe(self) -> str:
            return "OpenVINO 0 on CPU"

        def close(self) -> None:
            self.closed = True
            super().close()

    def open_wrong(artifact: Any, **how: Any) -> Any:
        opened.append(Wrong(FileModel(artifact.path, fused=True), **how))
        return opened[-1]

    monkeypatch.setattr(select, "OpenVinoBackend", open_wrong)
    return opened


def test_the_next_backend_is_taken(bf16_onnx: Path, wrong_openvino: list[Any]) -> None:
    passed: list[tuple[str, str]] = []
    with pytest.warns(SbertInferWarning, match="runs in FP32") as warned:
        engine = Engine(bf16_onnx, passed_over=lambda choice, why: passed.append((choice, why)))
    (warning,) = warned
    assert "OpenVINO 0 on CPU gives wrong vectors here: lowest cosine" in str(warning.message)
    assert "onnxruntime" in engine.info["backend"]
    assert engine.info["verified"]["verdict"] == "right"
    assert wrong_openvino[0].closed
    assert ("OpenVINO in BF16", str(warning.message).partition(": ")[2]) in passed
    engine.close()


def test_strict_raises(bf16_onnx: Path, wrong_openvino: list[Any]) -> None:
    with pytest.raises(WrongVectorsError, match=r"can't run in BF16.*lowest cosine.*sbert-verify") as raised:
        Engine(bf16_onnx, strict=True)
    assert str(raised.value).count(str(bf16_onnx)) == 1
    assert wrong_openvino[0].closed


def test_bounds_follow_certificate_and_precision(small_onnx: Path) -> None:
    manifest = open_artifact(small_onnx).manifest

    def least(device: str = "cpu", **parity: Any) -> float:
        precision = parity.pop("precision", "fp32")
        return bounds_of(replace(manifest, precision=precision, parity=parity), device)[0]

    assert least(min_cosine=1.0) == 1 - 5e-6
    assert least("cuda:0", min_cosine=1.0) == 1 - 1e-4  # TF32
    assert least(min_cosine=0.9999) == pytest.approx(0.9998)
    assert least(precision="int8", min_cosine=0.99, threshold=0.98) == pytest.approx(0.979)
    assert least(precision="bf16", min_cosine=1.0, threshold=0.9995) == pytest.approx(0.999)
    assert least("cuda:0", precision="bf16", min_cosine=0.9999, threshold=0.995) == pytest.approx(0.99)
    assert least(precision="fp16", min_cosine=1.0, threshold=0.999) == pytest.approx(0.998)


def test_packed_rows_on_a_double_of_a_gpu(
    small_plan: Path, lab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab().install(small_plan)
    with pytest.warns(SbertInferWarning, match="one was built"):
        engine = Engine(small_plan)
    with engine:
        assert engine.device == "cuda:0"
        assert engine.info["verified"]["verdict"] == "right"

    run = TensorRTBackend.run

    def mixed_up(self: TensorRTBackend, *args: Any, **options: Any) -> Any:
        return [np.roll(found, 1, axis=0) for found in run(self, *args, **options)]  # the texts of a batch

    monkeypatch.setattr(TensorRTBackend, "run", mixed_up)
    with Engine(small_plan) as engine:  # it was right before, on the same machine
        assert engine.device == "cuda:0"
    with pytest.warns(SbertInferWarning, match="runs with onnxruntime") as warned:
        engine = Engine(small_plan, verify="always")
    (warning,) = warned
    assert "gives wrong vectors here: lowest cosine" in str(warning.message)
    assert (engine.device, engine.info["verified"]["verdict"]) == ("cpu", "right")
    engine.close()
    for options in ({"strict": True}, {"device": "cuda"}):
        with pytest.raises(WrongVectorsError, match="gives wrong vectors here"):
            Engine(small_plan, verify="always", **options)
