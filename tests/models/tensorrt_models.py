"""Small encoders as in plans: standard operators, packed rows, 16-bit products, both outputs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

BF16 = np.dtype(ml_dtypes.bfloat16)
VOCABULARY, DIM, MOST_POSITIONS = 50, 16, 64


class _Graph:
    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self.random = np.random.default_rng(7)

    def weight(self, name: str, *shape: int) -> str:
        values = self.random.normal(size=shape) / np.sqrt(shape[0] if len(shape) > 1 else 1)
        return self.constant(name, values.astype(self.dtype))

    def constant(self, name: str, value: npt.NDArray[np.generic]) -> str:
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def add(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [output], name=f"node_{output}", **attributes))
        return output

    def cast(self, value: str, dtype: npt.DTypeLike, output: str) -> str:
        return self.add("Cast", [value], output, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def small_encoder(
    dtype: npt.DTypeLike = np.float16,
    *,
    positions: bool = True,
    foreign: tuple[str, ...] = (),
    wide: bool = False,
    outer: bool = False,
) -> bytes:
    """One attention layer on packed rows, and the mean of each segment, as in a plan.

    `positions`: has the input `position_ids`. `foreign`: operators at its end that nobody knows.
    `wide`: one product of tokens is in FP32. `outer`: one outer product is, as those of rotary
    positions are.
    """
    graph = _Graph(dtype)
    hidden = graph.add("Gather", [graph.weight("words", VOCABULARY, DIM), "input_ids"], "embedded")
    if positions:
        places = graph.add("Gather", [graph.weight("places", MOST_POSITIONS, DIM), "position_ids"], "placed")
        hidden = graph.add("Add", [hidden, places], "embedded_in_place")
    hidden = _attention(graph, hidden)
    if wide:
        hidden = graph.cast(hidden, np.float32, "widened")
        weight = graph.constant("wide_weight", np.eye(DIM, dtype=np.float32))
        hidden = graph.cast(graph.add("MatMul", [hidden, weight], "wide_product"), dtype, "narrowed")
    if outer:
        ids = graph.cast("input_ids", np.float32, "ids_of_outer")
        column = graph.add("Unsqueeze", [ids, graph.constant("column_axis", np.array([2]))], "column")
        table = graph.add("MatMul", [column, graph.constant("row", np.ones((1, DIM), np.float32))], "outer_product")
        hidden = graph.add("Add", [hidden, graph.cast(table, dtype, "table")], "tabled")
    graph.add("Identity", [hidden], "token_embeddings")
    _pooling(graph, hidden, "pooled" if foreign else "sentence_embedding")
    value = "pooled"
    for operator in foreign:
        last = operator == foreign[-1]
        value = graph.add(operator, [value], "sentence_embedding" if last else operator, domain="com.example")
    return _serialized(graph, positions)


def _attention(graph: _Graph, hidden: str) -> str:
    """Attention within each segment."""
    query, key, value = (
        graph.add("MatMul", [hidden, graph.weight(f"{name}_weight", DIM, DIM)], name)
        for name in ("query", "key", "value")
    )
    turned = graph.add("Transpose", [key], "key_turned", perm=[0, 2, 1])
    scores = graph.add("MatMul", [query, turned], "scores")
    columns, rows = (
        graph.add("Unsqueeze", ["segment_ids", graph.constant(name, np.array([axis]))], f"segments_{name}")
        for name, axis in (("columns", 2), ("rows", 1))
    )
    own = graph.add("Equal", [columns, rows], "own_segment")
    masked = graph.add("Where", [own, scores, graph.constant("hole", np.array(-1e4, graph.dtype))], "masked")
    weights = graph.add("Softmax", [masked], "weights", axis=-1)
    return graph.add("Add", [hidden, graph.add("MatMul", [weights, value], "mixed")], "attended")


def _pooling(graph: _Graph, hidden: str, output: str) -> None:
    """The mean of the columns start <= column < end of each segment; 0 for one without any."""
    length = graph.add("Squeeze", [graph.add("Shape", ["input_ids"], "length", start=1, end=2)], "length_scalar")
    numbers = [graph.constant(f"number{value}", np.array(value)) for value in (0, 1)]
    columns = graph.add("Range", [numbers[0], length, numbers[1]], "column_numbers")
    last = graph.constant("last", np.array([-1]))
    starts, ends = (graph.add("Unsqueeze", [name, last], f"{name}_last") for name in ("starts", "ends"))
    after, before = (
        graph.add("GreaterOrEqual", [columns, starts], "after"),
        graph.add("Less", [columns, ends], "before"),
    )
    inside = graph.cast(graph.add("And", [after, before], "inside"), graph.dtype, "members")
    total = graph.cast(graph.add("MatMul", [inside, hidden], "total"), np.float32, "total32")
    lengths = graph.cast(graph.add("Sub", [ends, starts], "lengths"), np.float32, "lengths32")
    count = graph.add("Max", [lengths, graph.constant("one32", np.array(1, np.float32))], "count")
    graph.add("Div", [total, count], output)


def _serialized(graph: _Graph, positions: bool) -> bytes:
    inputs = {"input_ids": "length", "segment_ids": "length", "starts": "segments", "ends": "segments"}
    if positions:
        inputs["position_ids"] = "length"
    values = [helper.make_tensor_value_info(name, TensorProto.INT64, ["rows", last]) for name, last in inputs.items()]
    kind = helper.np_dtype_to_tensor_dtype(graph.dtype)
    outputs = [
        helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["rows", "segments", DIM]),
        helper.make_tensor_value_info("token_embeddings", kind, ["rows", "length", DIM]),
    ]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 1)]
    made = helper.make_graph(graph.nodes, "encoder", values, outputs, graph.constants)
    return bytes(helper.make_model(made, opset_imports=opsets, ir_version=9).SerializeToString())
