"""The CPU graph of a plan: on the GPU model's weights, and as fused as the FP32 artifact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from sbert_infer.errors import ParityError
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.precision.cpu_graph import make_cpu_graph
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import GraphCandidate
from sbert_infer.export.verify.parity import MIN_COSINE, MIN_COSINE_OF_PLANS, Bounds, compare, expect
from tests.export.cases import CASES
from tests.export.precision.half import Half
from tests.models.checkpoints import LAYERS, ODD_TEXTS, TEXTS

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
DTYPES = {"half": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Pair:
    """Both graphs of a plan, and what they were made from."""

    reference: Reference
    half: bytes
    cpu: bytes
    fp32: bytes  # the FP32 artifact's graph
    precision: str

    @property
    def model(self) -> onnx.ModelProto:
        model: onnx.ModelProto = onnx.ModelProto.FromString(self.cpu)
        return model

    def write(self, folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(self.half)
        (folder / "cpu.onnx").write_bytes(self.cpu)
        return folder / "cpu.onnx"


@pytest.fixture(scope="module", params=[("camembert", "half"), ("albert", "half"), ("camembert", "bf16")], ids=str)
def pair(request: pytest.FixtureRequest, half_of: Callable[..., Half], graph_of: Callable[..., Path]) -> Pair:
    family, kind = request.param
    half = half_of(family, kind, **CASES[family])
    fp32 = graph_of(family, **CASES[family]).read_bytes()
    fused = ir.from_proto(onnx.load_model_from_string(fp32))
    cpu = make_cpu_graph(fused, half.content, DTYPES[kind])
    return Pair(half.reference, half.content, cpu, fp32, "bf16" if kind == "bf16" else "fp16")


def options(**changes: Any) -> Any:
    """As the runtime opens fused graphs."""
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


def optimized(model: bytes | Path, target: Path) -> Counter[tuple[str, str]]:
    """The operators that are left when onnxruntime has loaded the graph."""
    given = model if isinstance(model, bytes) else str(model)
    onnxruntime.InferenceSession(given, options(optimized_model_filepath=str(target)))
    return Counter((node.domain, node.op_type) for node in onnx.load(target).graph.node)


def candidate_of(pair: Pair, folder: Path) -> GraphCandidate:
    return GraphCandidate(onnxruntime.InferenceSession(str(pair.write(folder)), options()), pair.reference)


def shared_bytes(model: onnx.ModelProto) -> int:
    """How many bytes of the other file `model` refers to."""
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
    return sum(int(entry.value) for entry in entries if entry.key == "length")


def test_parity(pair: Pair, tmp_path: Path) -> None:
    candidate = candidate_of(pair, tmp_path)
    # Arithmetic is FP32, only weights are not.
    lowest = MIN_COSINE["fp32"] if pair.precision == "fp16" else MIN_COSINE_OF_PLANS["bf16"]
    certificate = compare(candidate, expect(pair.reference, ALL_TEXTS), Bounds.everywhere(lowest))
    assert certificate.min_cosine < 1 - 1e-9  # the weights are rounded
    assert certificate.batch_max_abs < 1e-5 * max(1.0, float(np.abs(pair.reference.encode(TEXTS)).max()))


def test_every_matrix_is_in_the_other_file(pair: Pair) -> None:
    inline = [tensor for tensor in pair.model.graph.initializer if not tensor.external_data]
    assert all(len(tensor.dims) < 2 or tensor.data_type == onnx.TensorProto.INT64 for tensor in inline)
    assert len(pair.cpu) < len(pair.fp32) / 2
    weights = {name: weight for name, weight in pair.reference.named_parameters() if weight.ndim == 2}
    numbers = sum(weight.numel() for name, weight in weights.items() if "encoder.pooler" not in name)
    assert shared_bytes(pair.model) == 2 * numbers


def test_ranges_hold_the_weights(pair: Pair) -> None:
    """Read as ONNX external data."""
    found = {}
    for tensor in pair.model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            assert place["location"] == "model.onnx"
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            array = np.frombuffer(pair.half, dtype, int(np.prod(tensor.dims)), int(place["offset"]))
            assert array.nbytes == int(place["length"])
            found[tensor.name.removesuffix(".half")] = array.reshape(tensor.dims)
    expected = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.ModelProto.FromString(pair.fp32).graph.initializer}
    assert len(found) >= 10
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name].astype(array.dtype), err_msg=name)


def test_onnxruntime_widens_the_weights_while_loading(pair: Pair, tmp_path: Path) -> None:
    casts = sum(node.op_type == "Cast" for node in pair.model.graph.node)
    left = optimized(pair.write(tmp_path), tmp_path / "cpu-optimized.onnx")
    assert casts > left["", "Cast"]
    assert left == optimized(pair.fp32, tmp_path / "fp32-optimized.onnx")
    assert left["com.microsoft", "MultiHeadAttention"] == LAYERS


def test_as_fused_as_the_fp32_artifact(pair: Pair) -> None:
    counts = [
        count_fused(ir.from_proto(onnx.ModelProto.FromString(content)), LAYERS, LAYERS)
        for content in (pair.cpu, pair.fp32)
    ]
    assert counts[0] == counts[1]
    assert (counts[0].attention, counts[0].gelu) == (LAYERS, LAYERS)


def test_opens_from_memory(pair: Pair, tmp_path: Path) -> None:
    settings = options()
    if not hasattr(settings, "add_external_initializers_from_files_in_memory"):
        pytest.skip("needs onnxruntime 1.24")
    weights = bytearray(pair.half)
    settings.add_external_initializers_from_files_in_memory(["model.onnx"], [weights], [len(weights)])
    session = onnxruntime.InferenceSession(pair.cpu, settings)
    weights[:] = bytes(len(weights))  # no longer needed
    ids, mask = pair.reference.tokenize(list(TEXTS))
    inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    expected = onnxruntime.InferenceSession(str(pair.write(tmp_path)), options()).run(None, inputs)[0]
    np.testing.assert_array_equal(session.run(None, inputs)[0], expected)


def test_weights_that_are_not_in_the_other_file_are_kept(pair: Pair, tmp_path: Path) -> None:
    fused = ir.from_proto(onnx.ModelProto.FromString(pair.fp32))
    cpu = make_cpu_graph(fused, ir.to_proto(ir.Model(ir.Graph([], [], nodes=[]), ir_version=8)).SerializeToString())
    other = replace(pair, cpu=cpu, half=b"")
    assert shared_bytes(other.model) == 0
    assert len(cpu) < 0.75 * len(pair.fp32)  # in FP16
    candidate = candidate_of(other, tmp_path)
    assert compare(candidate, expect(pair.reference, TEXTS), Bounds.everywhere(0.99)).min_cosine > 0.999


def test_wrong_weights_get_no_certificate(pair: Pair, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 60, len(pair.half), np.uint8).tobytes()
    candidate = candidate_of(replace(pair, half=noise), tmp_path)
    with pytest.raises(ParityError):
        compare(candidate, expect(pair.reference, TEXTS), Bounds.everywhere(MIN_COSINE_OF_PLANS["fp16"]))
