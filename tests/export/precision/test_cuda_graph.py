"""The CUDA graph of a plan: the reference's vectors in FP32 and FP16, its types and its masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer.errors import ExportError, ParityError
from sbert_infer.export.graph.cuda_rewrites import tune_for_cuda
from sbert_infer.export.precision.borrowed_weights import inline_weights
from sbert_infer.export.precision.cuda_graph import make_cuda_graph
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import GraphCandidate, open_half
from sbert_infer.export.verify.parity import MIN_COSINE, MIN_COSINE_OF_PLANS, Bounds, compare, expect
from tests.export.cases import CASES as OLDER
from tests.export.families.test_architectures import CASES as NEWER
from tests.export.families.test_architectures import LENGTH
from tests.export.precision.half import Half
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.families import LAYERS

CASES = {**OLDER, **{family: {"max_length": LENGTH, **options} for family, options in NEWER.items()}}
ALL_TEXTS = [*TEXTS, *ODD_TEXTS]
FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
MICROSOFT = "com.microsoft"
# Operators of onnxruntime's CUDA provider with a kernel for FP16, of those that a transformer uses
# (onnxruntime's docs/OperatorKernels.md, 1.30).
KERNELS = {"Add", "BiasGelu", "Cast", "Clip", "Concat", "Div", "Expand", "FastGelu", "Gather", "GatherElements", "Gelu"}
KERNELS |= {
    "GroupQueryAttention",
    "LayerNormalization",
    "MatMul",
    "Mul",
    "MultiHeadAttention",
    "Neg",
    "Relu",
    "Reshape",
}
KERNELS |= {"Sigmoid", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}
KERNELS |= {"Slice", "Split", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where"}


@dataclass(frozen=True)
class Graphs:
    """The FP32 graph fused for CUDA, and what it becomes in a plan."""

    reference: Reference
    half: bytes
    fp32: bytes
    cuda: bytes

    @property
    def model(self) -> onnx.ModelProto:
        """The FP16 graph with its weights."""
        return inline_weights(self.cuda, {"model.onnx": self.half})


@pytest.fixture(scope="module", params=CASES)
def graphs(request: pytest.FixtureRequest, half_of: Callable[..., Half], graph_of: Callable[..., Path]) -> Graphs:
    return graphs_of(request.param, half_of, graph_of)


@pytest.fixture(scope="module")
def plain(half_of: Callable[..., Half], graph_of: Callable[..., Path]) -> Graphs:
    return graphs_of("bert", half_of, graph_of)


def graphs_of(family: str, half_of: Callable[..., Half], graph_of: Callable[..., Path]) -> Graphs:
    half = half_of(family, **CASES[family])
    fp32 = graph_of(family, "cuda", **CASES[family]).read_bytes()
    return Graphs(half.reference, half.content, fp32, make_cuda_graph(parsed(fp32), half.content))


def parsed(content: bytes) -> ir.Model:
    return ir.from_proto(onnx.load_model_from_string(content))


def session_of(content: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    """Types of all values that are stated."""
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    stated = {value.name: value.type.tensor_type.elem_type for value in values}
    return stated | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def test_its_structure_gives_the_vectors_of_the_reference(graphs: Graphs) -> None:
    """In FP32, where onnxruntime has all of its operators on a CPU."""
    certificate = compare(
        GraphCandidate(session_of(graphs.fp32), graphs.reference),
        expect(graphs.reference, ALL_TEXTS),
        Bounds.everywhere(MIN_COSINE["fp32"]),
    )
    assert certificate.min_cosine > 1 - 1e-9


def test_parity_in_fp16(graphs: Graphs) -> None:
    candidate = GraphCandidate(open_half(graphs.model.SerializeToString()), graphs.reference)
    certificate = compare(
        candidate, expect(graphs.reference, ALL_TEXTS), Bounds.everywhere(MIN_COSINE_OF_PLANS["fp16"])
    )
    assert 0.9999 < certificate.min_cosine < 1 - 1e-8  # below 1: something was rounded


def test_onnxruntime_finds_its_types_consistent(graphs: Graphs) -> None:
    """It checks all types as it loads a graph, and widens FP16 where a CPU has no kernel."""
    session = session_of(graphs.model.SerializeToString())
    assert [value.name for value in session.get_outputs()] == ["sentence_embedding"]
    assert session.get_outputs()[0].type == "tensor(float)"
    assert {value.type for value in session.get_inputs()} == {"tensor(int64)"}


def test_what_runs_on_tokens_is_fp16(graphs: Graphs) -> None:
    model = graphs.model
    types = types_of(model)
    fused = [node for node in model.graph.node if node.domain == MICROSOFT or "LayerNorm" in node.op_type]
    attention = [node for node in fused if node.op_type in ("MultiHeadAttention", "GroupQueryAttention")]
    assert len(attention) == LAYERS
    assert {types[node.output[0]] for node in fused} <= {FLOAT16, *after_pooling(graphs)}
    assert {types[node.output[0]] for node in attention} == {FLOAT16}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert sum(types[node.output[0]] == FLOAT16 for node in products) >= 4 * LAYERS
    wide = {tuple(weight.shape) for weight in graphs.reference.head.parameters()}
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    for node in products:
        if types[node.output[0]] == FLOAT:
            assert {shapes[node.input[1]], shapes[node.input[1]][::-1]} & wide, "an FP32 product before pooling"


def after_pooling(graphs: Graphs) -> set[int]:
    """The type of a LayerNorm after pooling, if there is one."""
    return {FLOAT} if any("LayerNorm" in type(module).__name__ for module in graphs.reference.head) else set()


def test_every_fp16_operator_has_a_kernel_on_cuda(graphs: Graphs) -> None:
    types = types_of(graphs.model)
    half = {node.op_type for node in graphs.model.graph.node if FLOAT16 in [types.get(name) for name in node.output]}
    assert half <= KERNELS
    assert not {node.op_type for node in graphs.model.graph.node} & {"If", "Softmax", "Erf", "Pow"}


def test_norms_are_fused_with_the_sums_before_them(plain: Graphs) -> None:
    counts = Counter(node.op_type for node in plain.model.graph.node)
    assert (counts["SkipLayerNormalization"], counts["BiasGelu"]) == (2 * LAYERS, LAYERS)


def test_matrices_are_in_the_other_file(graphs: Graphs) -> None:
    model = onnx.load_model_from_string(graphs.cuda)
    inline = [t for t in model.graph.initializer if not t.external_data and t.data_type in (FLOAT, FLOAT16)]
    # DeBERTa's position vectors are computed from two matrices; those of Dense modules are FP32.
    own = [t for t in inline if len(t.dims) > 1 and "position_" not in t.name and np.prod(t.dims) > 16]
    assert [t.name for t in own if "head." not in t.name] == []
    assert {t.data_type for t in own} <= {FLOAT}
    assert graphs.reference.checkpoint.model_type == "deberta-v2" or len(graphs.cuda) < len(graphs.half) / 2
    for tensor, whole in zip(model.graph.initializer, graphs.model.graph.initializer, strict=True):
        if tensor.external_data:
            assert onnx.numpy_helper.to_array(whole).shape == tuple(tensor.dims)


def test_wrong_weights_get_no_certificate(plain: Graphs) -> None:
    noise = np.random.default_rng(0).integers(0, 60, len(plain.half), np.uint8).tobytes()
    model = inline_weights(plain.cuda, {"model.onnx": noise}).SerializeToString()
    with pytest.raises(ParityError):
        compare(
            GraphCandidate(open_half(model), plain.reference),
            expect(plain.reference, TEXTS),
            Bounds.everywhere(MIN_COSINE_OF_PLANS["fp16"]),
        )


def test_a_constant_beyond_fp16_is_refused(plain: Graphs) -> None:
    fused = parsed(plain.fp32)
    for value in fused.graph.initializers.values():
        if str(value.name).endswith("LayerNorm.weight") and value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy() + np.float32(1e5))
    with pytest.raises(ExportError, match=r"FP16 can't hold the constant .*LayerNorm\.weight"):
        make_cuda_graph(fused, plain.half)


# -------------------------------------------------------------------------------------------------
# masks


def masked_graph(side: str) -> onnx.ModelProto:
    """Attention with a padding mask, rewritten; its mask and bias are outputs as well."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18, "com.microsoft" : 1]>
        graph (int64[batch, length] attention_mask, float[batch, length, 16] x) => (float[batch, length, 16] y)
        {
            mask = Cast <to = 6> (attention_mask)
            y = com.microsoft.MultiHeadAttention <num_heads = 2> (x, x, x, , mask)
        }
    """)
    rewritten: onnx.ModelProto = ir.to_proto(tune_for_cuda(ir.from_proto(model), side))
    (attention,) = [node for node in rewritten.graph.node if node.op_type == "MultiHeadAttention"]
    kinds = {4: onnx.TensorProto.INT32, 5: FLOAT}
    for index, name in enumerate(attention.input):
        if index in kinds and name:
            rewritten.graph.output.append(onnx.helper.make_tensor_value_info(name, kinds[index], None))
    return rewritten


def masks_of(lengths: list[int], longest: int, side: str) -> tuple[np.ndarray, np.ndarray]:
    mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
    mask = mask if side == "right" else mask[:, ::-1]
    x = np.random.default_rng(0).normal(size=(*mask.shape, 16)).astype(np.float32)
    y, given = session_of(masked_graph(side).SerializeToString()).run(None, {"attention_mask": mask, "x": x})
    for row, length in enumerate(lengths):  # as if the text were alone
        place = slice(length) if side == "right" else slice(longest - length, longest)
        alone = {"attention_mask": mask[row : row + 1, place], "x": x[row : row + 1, place]}
        expected = session_of(masked_graph(side).SerializeToString()).run(["y"], alone)[0]
        np.testing.assert_allclose(y[row, place], expected[0], atol=1e-5)
    return mask, given


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_padding_on_the_right_is_lengths_and_places(data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, 9))
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=5))
    _, given = masks_of(lengths, longest, "right")
    starts = [row * longest for row in range(len(lengths) + 1)]
    np.testing.assert_array_equal(given, [*lengths, *starts, *starts])


def test_padding_on_the_left_is_a_bias() -> None:
    mask, given = masks_of([3, 5, 1], 5, "left")
    assert given.shape == (3, 1, 5, 5)
    np.testing.assert_array_equal(given == 0, np.broadcast_to(mask[:, None, None] == 1, given.shape))


def test_a_row_of_padding_gives_no_nan(plain: Graphs) -> None:
    ids, mask = (tensor.numpy() for tensor in plain.reference.tokenize(["some text", *TEXTS[:2]]))
    session = open_half(plain.model.SerializeToString())
    expected = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    mask = mask.copy()
    mask[0] = 0
    vectors = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    assert np.isfinite(vectors).all()
    np.testing.assert_array_equal(vectors[1:], expected[1:])
