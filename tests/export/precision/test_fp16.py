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

from sbert_infer.backends.tensorrt.build import build_engine
from sbert_infer.backends.tensorrt.versions import load as load_tensorrt
from sbert_infer.errors import ParityError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.checkpoint.transformer import first_position
from sbert_infer.export.graph.trace import OPSET
from sbert_infer.export.precision import fp16 as half_module
from sbert_infer.export.precision.fp16 import to_half
from sbert_infer.export.reference.encoder import Reference, load_reference
from sbert_infer.export.verify.candidate import open_half
from sbert_infer.export.verify.fp16_emulation import emulate_half
from sbert_infer.export.verify.packed_candidate import MIN_SAME, PackedCandidate, cosine_among_others
from sbert_infer.export.verify.parity import MIN_COSINE_OF_PLANS, Bounds, compare, expect
from sbert_infer.similarity import cosine
from sbert_infer.text.shapes import choose_shapes
from sbert_infer.types import Shape
from tests.export.cases import CASES
from tests.export.precision.half import Half
from tests.models.checkpoints import FAMILIES, LAYERS, ODD_TEXTS, TEXTS, WIDTH
from tests.models.families import NEWER
from tests.models.graphs import Array, nodes, open_session

MakeCheckpoint = Callable[..., Path]
HalfOf = Callable[..., Half]

# RoBERTa and its kin skip the padding token when they count positions, also one in the text.
SPELLED_OUT = "[CLS] <s> <pad> some words <pad> [PAD] and more <|endoftext|>"
ALL_TEXTS = [*TEXTS, *ODD_TEXTS, SPELLED_OUT]
FLOAT, FLOAT16, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64
FP16, BF16 = (Bounds.everywhere(MIN_COSINE_OF_PLANS[precision]) for precision in ("fp16", "bf16"))
# Models whose positions are differences of columns.
WITHOUT_POSITIONS = ("t5", "deberta-v2")


@pytest.fixture(scope="module", params=[*FAMILIES, *NEWER])
def half(request: pytest.FixtureRequest, half_of: HalfOf) -> Half:
    return half_of(request.param, **CASES.get(request.param, {}))


def empty_rows(model: onnx.ModelProto, rows: int = 2, length: int = 6, segments: int = 2) -> dict[str, Array]:
    """Inputs for rows in which nothing is."""
    shapes = {
        value.name: (rows, segments if value.name in ("starts", "ends") else length) for value in model.graph.input
    }
    return {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}


def emulated_session(content: bytes) -> Any:
    """As `open_half` opens it: onnxruntime's optimizations would remove the rounding."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(ir.to_proto(emulate_half(content)).SerializeToString(), options)


def test_parity_alone_in_mixed_rows_and_with_prompts(half: Half) -> None:
    candidate = PackedCandidate(open_half(half.content), half.reference, packed=True)
    certificate = compare(candidate, expect(half.reference, ALL_TEXTS), FP16)
    assert 0.9999 < certificate.min_cosine < 1 - 1e-8  # below 1: something was rounded


def test_a_vector_does_not_depend_on_its_row(half: Half) -> None:
    """Many short texts share a row; whatever else is in it changes but the rounding of sums."""
    session = open_half(half.content)
    assert cosine_among_others(session, half.reference) >= MIN_SAME["fp16"]
    candidate = PackedCandidate(session, half.reference, packed=True)
    texts = [word for text in TEXTS for word in text.split()]
    together, others = candidate.encode(texts), candidate.encode([*reversed(texts), SPELLED_OUT])
    alone = PackedCandidate(session, half.reference, packed=False).encode(texts)
    for vectors in (together, others[-2::-1]):
        assert cosine(vectors, alone).min() > 1 - 1e-6
        np.testing.assert_allclose(vectors, alone, rtol=0, atol=2e-3 * np.abs(alone).max())


@pytest.mark.parametrize("family", [*FAMILIES, *NEWER])
def test_rows_longer_than_the_longest_text(family: str, half_of: HalfOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have a multiple of 8 tokens, also if the model's limit is none."""
    half = half_of(family, max_length=13)
    session, lengths = open_half(half.content), []
    run = session.run

    def watch(outputs: list[str], inputs: dict[str, Array]) -> Any:
        lengths.append(inputs["input_ids"].shape[1])
        return run(outputs, inputs)

    monkeypatch.setattr(session, "run", watch)
    expected = expect(half.reference, [" ".join(TEXTS), *TEXTS])
    compare(PackedCandidate(session, half.reference, packed=True), expected, FP16)
    assert max(lengths) == choose_shapes(None, 13, WIDTH, 64)[-1].length == 16


def test_cls_of_texts_that_are_all_prompt(half_of: HalfOf) -> None:
    """Nothing is left to pool, and their vector is that of their first token."""
    session = open_half(half_of("roberta", pooling=("cls",)).content)
    rows = {"input_ids": [5, 6, 7, 8, 9], "segment_ids": [1, 1, 1, 2, 2], "position_ids": [0, 1, 2, 0, 1]}
    inputs = {name: np.array([row]) for name, row in rows.items()}
    ends = np.array([[3, 5]])
    (whole,) = session.run(["sentence_embedding"], {**inputs, "starts": np.array([[0, 3]]), "ends": ends})
    (nothing,) = session.run(["sentence_embedding"], {**inputs, "starts": ends, "ends": ends})
    assert np.abs(whole[0, 0] - whole[0, 1]).max() > 0.01
    np.testing.assert_array_equal(nothing, whole)


def test_runs_in_plain_onnxruntime(half: Half) -> None:
    candidate = PackedCandidate(open_session(half.model), half.reference, packed=True)
    vectors, expected = candidate.encode(ALL_TEXTS), half.reference.encode(ALL_TEXTS)
    assert np.abs(vectors - expected).max() < 5e-3 * np.linalg.norm(expected, axis=1).max()
    onnx.checker.check_model(half.model, full_check=True)


def test_inputs_and_outputs(half: Half) -> None:
    graph, model_type = half.model.graph, half.reference.checkpoint.model_type
    wanted = {"input_ids": "length", "segment_ids": "length", "position_ids": "length"}
    wanted |= {"starts": "segments", "ends": "segments"}
    if model_type in WITHOUT_POSITIONS:
        del wanted["position_ids"]
    assert {value.type.tensor_type.elem_type for value in graph.input} == {INT64}
    shapes = {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in graph.input}
    assert shapes == {name: ["rows", second] for name, second in wanted.items()}
    sentence, tokens = graph.output
    assert (sentence.name, sentence.type.tensor_type.elem_type) == ("sentence_embedding", FLOAT)
    assert (tokens.name, tokens.type.tensor_type.elem_type) == ("token_embeddings", FLOAT16)
    dims = [
        [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in (sentence, tokens)
    ]
    assert dims == [["rows", "segments", half.reference.checkpoint.dim], ["rows", "length", WIDTH]]


def test_standard_operators_and_fp16_weights(half: Half) -> None:
    model = half.model
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
    assert not model.functions
    assert len(nodes(model, "Softmax")) == LAYERS
    assert not nodes(model, "GatherND", "ScatterND")
    assert len(nodes(model, "CumSum")) == (first_position(half.reference.encoder.config) > 0)
    assert all(tensor.raw_data for tensor in model.graph.initializer)
    matrices = [t for t in model.graph.initializer if len(t.dims) == 2 and t.data_type in (FLOAT, FLOAT16)]
    assert {t.data_type for t in matrices if min(t.dims) > 1} == {FLOAT16}
    assert b"site-packages" not in half.content


def test_only_attention_compares_every_pair_of_tokens(half: Half) -> None:
    """Its scores have heads, [rows, heads, length, length], and its mask has one for all heads."""
    graph = onnx.shape_inference.infer_shapes(half.model).graph
    dims = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in graph.value_info]
    assert ["rows", "", "length", "length"] in dims  # the scores: so shapes are known
    assert ["rows", "length", "length"] not in dims


def test_no_number_is_too_large_for_fp16(half: Half) -> None:
    for tensor in half.model.graph.initializer:
        if tensor.data_type == FLOAT16:
            assert np.isfinite(onnx.numpy_helper.to_array(tensor)).all(), tensor.name


def test_rows_without_texts_give_no_nan(half: Half) -> None:
    vectors, tokens = emulated_session(half.content).run(None, empty_rows(half.model))
    assert np.isfinite(vectors).all()
    assert np.isfinite(tokens).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_reference_is_left_as_it_was(
    dtype: torch.dtype, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = load_reference(read_checkpoint(make_checkpoint("camembert", **CASES["camembert"])))

    def fail(module: torch.nn.Module, *_: object) -> None:
        rows = torch.ones(1, 3, dtype=torch.int64)
        with torch.inference_mode():
            vectors, tokens = module(rows, rows, torch.arange(3)[None], rows[:, :1] * 0, rows[:, :1])
        assert vectors.isfinite().all()
        assert (vectors.dtype, tokens.dtype) == (torch.float32, dtype)
        raise RuntimeError("tracing failed")

    monkeypatch.setattr(half_module, "trace_packed", fail)
    with pytest.raises(RuntimeError, match="tracing failed"):
        to_half(reference, dtype)
    assert_as_loaded(reference)


def assert_as_loaded(reference: Reference) -> None:
    """The weights, their types and the modules of `reference` are those of a new one."""
    fresh = load_reference(reference.checkpoint)
    right = fresh.state_dict()
    for name, weight in reference.state_dict().items():
        assert weight.dtype == right[name].dtype
        assert torch.equal(weight, right[name]), name
    assert not any("forward" in vars(module) for module in reference.modules())
    np.testing.assert_array_equal(reference.encode(TEXTS), fresh.encode(TEXTS))


def test_tensorrt_builds_it(half: Half) -> None:
    """For the oldest GPU, which has no FP32 products and no BF16, and for a newer one."""
    pytest.importorskip("tensorrt_rtx")
    trt = load_tensorrt("tensorrt_rtx")
    for target in ("sm75", "sm89"):
        assert build_engine(trt, half.content, [Shape(2, 16, 4)], precision="fp16", target=target).engine


def test_every_product_is_fp16_and_every_norm_fp32(half: Half) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(half.content), [parser.get_error(i).desc() for i in range(parser.num_errors)]
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    products = [layer for layer in layers if layer.type == trt.LayerType.MATRIX_MULTIPLY]
    summed = [layer.get_output(0).dtype for layer in products if layer.get_input(0).shape[-1] != 1]
    assert len(summed) >= 6 * LAYERS + 1  # query, key and value (or all in one), scores, ...; and pooling
    assert set(summed) == {trt.DataType.HALF}
    norms = [layer.get_output(0).dtype for layer in layers if layer.type == trt.LayerType.NORMALIZATION]
    assert set(norms) <= {trt.DataType.FLOAT}
    assert [network.get_output(index).dtype for index in (0, 1)] == [trt.DataType.FLOAT, trt.DataType.HALF]


# -------------------------------------------------------------------------------------------------
# BF16


@pytest.mark.parametrize("family", ["bert", "t5", "gemma3_text"])
def test_bf16(family: str, half_of: HalfOf) -> None:
    half = half_of(family, "bf16")
    model = half.model
    types = {tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2 and min(tensor.dims) > 1}
    assert types == {onnx.TensorProto.BFLOAT16}
    assert [value.type.tensor_type.elem_type for value in model.graph.output] == [FLOAT, onnx.TensorProto.BFLOAT16]
    session = open_half(half.content)
    assert cosine_among_others(session, half.reference) >= MIN_SAME["bf16"]
    candidate = PackedCandidate(session, half.reference, packed=True)
    certificate = compare(candidate, expect(half.reference, ALL_TEXTS), BF16)
    assert BF16.natural < certificate.min_cosine < 1 - 1e-6  # coarser than FP16


# -------------------------------------------------------------------------------------------------
# emulation


@pytest.mark.parametrize(
    ("dtype", "one", "expected"),
    [
        # 2049 has no FP16 of its own; 70000 is beyond its end, 1e-9 below its beginning.
        ("float16", 15360, [1, 2047, np.inf, 0]),
        # BF16 has steps of 8 and 16 around 2048, and of 512 at 70000; of 1 + 1e-9 it keeps the 1.
        ("bfloat16", 16256, [1, 2048, 70144, 0]),
    ],
)
def test_emulation_rounds_after_each_node(dtype: str, one: int, expected: list[float]) -> None:
    number = {"float16": FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}[dtype]
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        graph (float[n] x) => ({dtype}[n] y)
        <{dtype}[1] one = {{{one}}}>
        {{
            half = Cast <to = {number}> (x)
            larger = Add(half, one)
            y = Sub(larger, one)
        }}
    """)
    x = np.array([1.0, 2048.0, 70000.0, 1e-9], np.float32)
    (y,) = emulated_session(model.SerializeToString()).run(None, {"x": x})
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, expected)


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
        compare(
            PackedCandidate(open_half(model.SerializeToString()), half.reference, packed=True),
            expected,
            Bounds.everywhere(0.0),
        )
    plain = PackedCandidate(open_session(model), half.reference, packed=True).encode(TEXTS)
    assert np.isfinite(plain).all()  # so the emulation is needed
