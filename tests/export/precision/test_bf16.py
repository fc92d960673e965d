"""BF16 for CPUs: half the size, standard operators, vectors that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from sbert_infer import Engine, SbertInferWarning
from sbert_infer.artifact import open_artifact
from sbert_infer.backends import openvino_install, select
from sbert_infer.errors import EngineError, ExportError, ParityError
from sbert_infer.export.exporter import ExportOptions, default_output, export
from sbert_infer.export.report import inspect, warnings
from tests.models.graphs import cosine

MakeCheckpoint = Callable[..., Path]

LIMIT = 40  # tokens: more than two vectors of 16 numbers, so that the order of a sum can matter
TEXTS = [" ".join(["the storm reached the quiet harbour before dawn"] * 4)[: 7 + 5 * n] for n in range(30)]
NO = "this CPU has no BF16 that OpenVINO uses"


@pytest.fixture(scope="module")
def minilm(minilm_path: Path, once: Callable[..., Path]) -> Path:
    options = ExportOptions(bf16=True, max_length=LIMIT)
    return once("minilm bf16", "minilm.bf16.onnx", lambda target: export(minilm_path, target, options))


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_install, "_kept_trial", lambda found, limit: ("never", NO))


def test_the_file_has_half_the_size_and_standard_operators(minilm: Path, minilm_onnx: Path) -> None:
    model = onnx.load(minilm)
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} == {""}
    assert minilm.stat().st_size < 0.52 * minilm_onnx.stat().st_size


def test_its_certificate_is_above_the_bound(minilm: Path) -> None:
    manifest = open_artifact(minilm).manifest
    assert manifest.precision == "bf16"
    assert manifest.parity["threshold"] == 0.9995 <= manifest.parity["min_cosine"]


@pytest.mark.skipif(openvino_install.why_no_bf16() is not None, reason=f"{openvino_install.why_no_bf16()}")
def test_vectors_are_the_same_bits_alone_and_in_any_batch(minilm: Path) -> None:
    with Engine(minilm, on_truncate="ignore", max_batch_tokens=4096, workers=1) as engine:
        alone = np.stack([engine.encode(text) for text in TEXTS])
        assert "OpenVINO" in engine.info["backend"]
        assert np.array_equal(engine.pipeline.run_together(TEXTS), alone)
    with Engine(minilm, on_truncate="ignore", max_batch_tokens=100, workers=3) as engine:
        assert np.array_equal(engine.encode(TEXTS), alone)


def test_without_bf16_it_runs_in_fp32_and_says_so(minilm: Path, minilm_onnx: Path, no_bf16: None) -> None:
    with pytest.warns(SbertInferWarning, match=f"runs in FP32 with onnxruntime.*: {NO}"):
        engine = Engine(minilm, on_truncate="ignore")
    with engine, Engine(minilm_onnx, on_truncate="ignore") as exact:
        exact.max_seq_length = LIMIT
        assert cosine(engine.encode(TEXTS), exact.encode(TEXTS)).min() > 0.9995


def test_a_certificate_taken_in_fp32_is_shown_as_such(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, no_bf16: None
) -> None:
    target = tmp_path / "tiny.bf16.onnx"
    manifest = export(make_checkpoint(), target, ExportOptions(bf16=True, max_length=24, min_cosine=0.9))
    assert "openvino" not in manifest.versions
    assert any("compared in FP32" in line for line in warnings(str(make_checkpoint()), manifest, portable=True))
    assert "texts in FP32" in inspect(target)


def test_a_graph_that_openvino_does_not_compile(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial passes, and the certificate is that of FP32 all the same."""

    def refuse(*_: object, **__: object) -> None:
        raise EngineError("OpenVINO can't compile it")

    monkeypatch.setattr(openvino_install, "_verdict", lambda: "")
    monkeypatch.setattr(select, "OpenVinoBackend", refuse)
    target = tmp_path / "tiny.bf16.onnx"
    manifest = export(make_checkpoint(), target, ExportOptions(bf16=True, max_length=24, min_cosine=0.9))
    assert "openvino" not in manifest.versions
    assert "it could not when this was exported" in next(warnings("", manifest, portable=True))


@pytest.mark.skipif(openvino_install.why_no_bf16() is not None, reason=f"{openvino_install.why_no_bf16()}")
def test_a_certificate_of_openvino_names_it(minilm: Path) -> None:
    manifest = open_artifact(minilm).manifest
    assert manifest.versions["openvino"] == openvino_install.openvino_version()


def test_a_model_for_which_it_is_too_coarse(make_checkpoint: MakeCheckpoint, tmp_path: Path, no_bf16: None) -> None:
    """Rounding the weights alone, at a bound that no rounding reaches."""
    with pytest.raises(ParityError, match=r"take FP32, or accept less with --min-cosine. In BF16, the lowest cosine"):
        export(make_checkpoint(), tmp_path / "tiny.onnx", ExportOptions(bf16=True, max_length=24, min_cosine=1.0))


def test_a_prompt_that_is_not_pooled(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The length of the prompt is an input of the graph."""
    checkpoint = make_checkpoint(prompts={"query": "find this: "}, include_prompt=False)
    paths = [tmp_path / "wide.onnx", tmp_path / "tiny.bf16.onnx"]
    export(checkpoint, paths[0], ExportOptions(max_length=24))
    export(checkpoint, paths[1], ExportOptions(bf16=True, max_length=24, min_cosine=0.9))
    right, found = (_encode(path, "query") for path in paths)
    assert cosine(found, right).min() > 0.999
    assert cosine(found, _encode(paths[1], None)).min() < 0.999


@pytest.mark.filterwarnings("default::sbert_infer.SbertInferWarning")
def _encode(path: Path, prompt_name: str | None) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    with Engine(path, on_truncate="ignore") as engine:
        return np.asarray(engine.encode(TEXTS[:9], prompt_name=prompt_name))


def test_the_name_and_what_does_not_go_together() -> None:
    assert default_output("org/model", ExportOptions(bf16=True)) == Path("model.bf16.onnx")
    assert default_output("org/model", ExportOptions(bf16=True, fp16=True)) == Path("model.plan")
    with pytest.raises(ExportError, match="leave out --portable and --int8"):
        ExportOptions(bf16=True, int8=True)
