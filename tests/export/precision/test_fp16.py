"""The FP16 graph: its types, operators that TensorRT supports, and the reference's vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from sbert_infer.errors import ParityError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.graph.trace import OPSET
from sbert_infer.export.precision import fp16 as half_module
from sbert_infer.export.precision.fp16 import to_half
from sbert_infer.export.reference.encoder import Reference, load_reference
from sbert_infer.export.verify.candidate import GraphCandidate, open_half
from sbert_infer.export.verify.fp16_emulation import emulate_half
from sbert_infer.export.verify.parity import MIN_COSINE, compare, expect
from tests.export.cases import CASES
from tests.export.precision.half import Half
from tests.models.checkpoints import FAMILIES, LAYERS, ODD_TEXTS, TEXTS, WIDTH
from tests.models.graphs import Array, constants, nodes, open_session

MakeCheckpoint = Callable[..., Path]
HalfOf = Callable[..., Half]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
FLOAT, FLOAT16, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64


@pytest.fixture(scope="module", params=FAMILIES)
def half(request: pytest.FixtureRequest, half_of: HalfOf) -> Half:
    return half_of(request.param, **CASES[request.param])


def inputs(reference: Reference, texts: list[str]) -> dict[str, Array]:
    ids, mask = reference.tokenize(texts)
    prompt = {} if reference.checkpoint.pooling.include_prompt else {"prompt_length": np.array(0)}
    return {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), **prompt}


def emulated_session(content: bytes) -> Any:
    """As `GraphCandidate` opens it: onnxruntime's optimizations would remove the rounding."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(ir.to_proto(emulate_half(content)).SerializeToString(), options)


def test_parity(half: Half) -> None:
    candidate = GraphCandidate(open_half(half.content), half.reference)
    certificate = compare(candidate, expect(half.reference, ALL_TEXTS), MIN_COSINE["fp16"])
    assert 0.9999 < certificate.min_cosine < 1 - 1e-8  # below 1: something was rounded


def test_runs_in_plain_onnxruntime(half: Half) -> None:
    session = open_session(half.model)
    vectors = session.run(["sentence_embedding"], inputs(half.reference, ALL_TEXTS))[0]
    expected = half.reference.encode(ALL_TEXTS)
    assert np.abs(vectors - expected).max() < 5e-3 * np.linalg.norm(expected, axis=1).max()
    onnx.checker.check_model(half.model, full_check=True)


def test_inputs_and_output(half: Half) -> None:
    graph = half.model.graph
    prompt = [] if half.reference.checkpoint.pooling.include_prompt else ["prompt_length"]
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask", *prompt]
    assert {value.type.tensor_type.elem_type for value in graph.input} == {INT64}
    shapes = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in graph.input]
    assert shapes == [["batch", "length"]] * 2 + [[]] * len(prompt)
    assert "prompt_length" not in constants(half.model)  # TensorRT would take a default for a constant
    (output,) = graph.output
    assert (output.name, output.type.tensor_type.elem_type) == ("sentence_embedding", FLOAT)
    assert [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim] == [
        "batch",
        half.reference.checkpoint.dim,
    ]


def test_standard_operators_and_fp16_weights(half: Half) -> None:
    model = half.model
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    assert not model.functions
    assert len(nodes(model, "Softmax")) == LAYERS
    assert not nodes(model, "IsNaN", "GatherND", "Pow" if half.reference.checkpoint.model_type != "albert" else "")
    assert all(tensor.raw_data for tensor in model.graph.initializer)
    after_pooling = {tuple(weight.shape) for weight in half.reference.head.parameters()}
    after_pooling |= {shape[::-1] for shape in after_pooling}
    matrices = [t for t in model.graph.initializer if len(t.dims) == 2 and t.data_type in (FLOAT, FLOAT16)]
    assert {t.data_type for t in matrices if tuple(t.dims) not in after_pooling} == {FLOAT16}
    assert {t.data_type for t in matrices if tuple(t.dims) in after_pooling} <= {FLOAT}
    assert b"site-packages" not in half.content


def test_no_number_is_too_large_for_fp16(half: Half) -> None:
    for tensor in half.model.graph.initializer:
        if tensor.data_type == FLOAT16:
            assert np.isfinite(onnx.numpy_helper.to_array(tensor)).all(), tensor.name


def test_a_row_of_padding_gives_no_nan(half: Half) -> None:
    given = inputs(half.reference, ["some text", *TEXTS[:2]])
    session = emulated_session(half.content)
    expected = session.run(None, given)[0]
    given["attention_mask"][0] = 0
    vectors = session.run(None, given)[0]
    assert np.isfinite(vectors).all()
    np.testing.assert_array_equal(vectors[1:], expected[1:])


def test_the_reference_is_left_as_it_was(half: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: torch.nn.Module, *_: object, **__: object) -> None:
        ids, mask = half.reference.tokenize(TEXTS)
        with torch.inference_mode():
            assert module(ids, mask).isfinite().all()
        raise RuntimeError("tracing failed")

    monkeypatch.setattr(half_module, "trace", fail)
    with pytest.raises(RuntimeError, match="tracing failed"):
        to_half(half.reference)
    assert_as_loaded(half.reference)


def assert_as_loaded(reference: Reference) -> None:
    """The weights, their types and the modules of `reference` are those of a new one."""
    fresh = load_reference(reference.checkpoint)
    right = fresh.state_dict()
    for name, weight in reference.state_dict().items():
        assert weight.dtype == right[name].dtype
        assert torch.equal(weight, right[name]), name
    assert not any("forward" in vars(module) for module in reference.modules())
    np.testing.assert_array_equal(reference.encode(TEXTS), fresh.encode(TEXTS))


def test_tensorrt_parses_it_with_half_products(half: Half) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(half.content), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    products = [layer.get_output(0) for layer in layers if layer.type == trt.LayerType.MATRIX_MULTIPLY]
    of_tokens = [tensor.dtype for tensor in products if len(tensor.shape) > 2]
    assert len(of_tokens) >= 8 * LAYERS  # query, key, value, scores, context, output, and two of the feed-forward
    assert set(of_tokens) == {trt.DataType.HALF}
    assert {tensor.dtype for tensor in products if len(tensor.shape) == 2} <= {trt.DataType.FLOAT}
    norms = [layer.get_output(0).dtype for layer in layers if layer.type == trt.LayerType.NORMALIZATION]
    assert len(norms) >= 2 * LAYERS
    assert set(norms) == {trt.DataType.FLOAT}
    assert network.get_output(0).dtype == trt.DataType.FLOAT


# -------------------------------------------------------------------------------------------------
# token vectors


def test_token_output(make_checkpoint: MakeCheckpoint) -> None:
    options = {**CASES["mpnet"], **CASES["albert"]}
    reference = load_reference(read_checkpoint(make_checkpoint("distilbert", **options)))
    content = ir.to_proto(to_half(reference, token_output=True)).SerializeToString()
    assert_as_loaded(reference)
    graph = onnx.load_model_from_string(content).graph
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask"]
    (output,) = graph.output
    assert (output.name, output.type.tensor_type.elem_type) == ("token_embeddings", FLOAT16)
    assert [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim] == ["batch", "length", WIDTH]
    expected = expect(reference, ALL_TEXTS)
    assert compare(GraphCandidate(open_half(content), reference), expected, MIN_COSINE["fp16"]).min_cosine > 0.9999


# -------------------------------------------------------------------------------------------------
# emulation


def test_emulation_rounds_after_each_node() -> None:
    # 15360: the bits of 1
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        graph (float[n] x) => (float16[n] y)
        <float16[1] one = {15360}>
        {
            half = Cast <to = 10> (x)
            larger = Add(half, one)
            y = Sub(larger, one)
        }
    """)
    x = np.array([1.0, 2048.0, 70000.0, 1e-9], np.float32)
    (y,) = emulated_session(model.SerializeToString()).run(None, {"x": x})
    assert y.dtype == np.float32
    # 2049 has no FP16 of its own; 70000 is beyond its end, 1e-9 below its beginning.
    np.testing.assert_array_equal(y, [1, 2047, np.inf, 0])


def test_a_model_that_overflows_gets_no_certificate(half_of: HalfOf) -> None:
    half = half_of()
    model = half.model
    for tensor in model.graph.initializer:  # each within the limit, but not their sum
        if tensor.name.endswith(("layer.1.output.dense.bias", "layer.1.attention.output.LayerNorm.bias")):
            array = onnx.numpy_helper.to_array(tensor).copy()
            array[:] = 6e4
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    expected = expect(half.reference, TEXTS)
    with pytest.raises(ParityError, match="NaN or infinity"):
        compare(GraphCandidate(open_half(model.SerializeToString()), half.reference), expected, 0.0)
    plain = open_session(model).run(None, inputs(half.reference, list(TEXTS)))[0]
    assert np.isfinite(plain).all()  # so the emulation is needed
