"""Small encoders as in plans: standard operators, FP16 products, FP32 pooling."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

VOCABULARY, DIM = 50, 16


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
    prompt_length: bool = False,
    tokens: bool = False,
    foreign: tuple[str, ...] = (),
    wide: bool = False,
    outer: bool = False,
) -> bytes:
    """One attention layer and mean pooling.

    `tokens`: gives the token vectors, without pooling. `foreign`: operators at its end that nobody
    knows. `wide`: one product is in FP32. `outer`: one outer product is, as those of rotary
    positions are.
    """
    graph = _Graph(dtype)
    hidden = _attention(graph, graph.add("Gather", [graph.weight("words", VOCABULARY, DIM), "input_ids"], "embedded"))
    if wide:
        hidden = graph.cast(hidden, np.float32, "widened")
        weight = graph.constant("wide_weight", np.eye(DIM, dtype=np.float32))
        hidden = graph.add("MatMul", [hidden, weight], "wide_product")
    if outer:
        mask = graph.cast("attention_mask", np.float32, "mask_of_outer")
        column = graph.add("Unsqueeze", [mask, graph.constant("column_axis", np.array([2]))], "column")
        table = graph.add("MatMul", [column, graph.constant("row", np.ones((1, DIM), np.float32))], "outer_product")
        hidden = graph.add("Add", [hidden, graph.cast(table, dtype, "table")], "placed")
    output = "token_embeddings"
    shape: list[str | int] = ["batch", "length", DIM]
    if tokens:
        graph.cast(hidden, np.float16, output)
    else:
        output, shape = "sentence_embedding", ["batch", DIM]
        _pooling(graph, hidden, prompt_length, "pooled" if foreign else output)
    value = "pooled"
    for operator in foreign:
        value = graph.add(operator, [value], output if operator == foreign[-1] else operator, domain="com.example")
    return _serialized(graph, output, shape, tokens, prompt_length)


def _attention(graph: _Graph, hidden: str) -> str:
    """Attention without the masked tokens."""
    query, key, value = (
        graph.add("MatMul", [hidden, graph.weight(f"{name}_weight", DIM, DIM)], name)
        for name in ("query", "key", "value")
    )
    turned = graph.add("Transpose", [key], "key_turned", perm=[0, 2, 1])
    scores = graph.add("MatMul", [query, turned], "scores")
    seen = graph.add("Unsqueeze", ["attention_mask", graph.constant("rows", np.array([1]))], "mask_rows")
    hole = graph.constant("hole", np.array(-1e4, graph.dtype))
    masked = graph.add("Where", [graph.cast(seen, np.bool_, "seen"), scores, hole], "masked")
    weights = graph.add("Softmax", [masked], "weights", axis=-1)
    return graph.add("Add", [hidden, graph.add("MatMul", [weights, value], "mixed")], "attended")


def _pooling(graph: _Graph, hidden: str, prompt_length: bool, output: str) -> None:
    wide = graph.cast(hidden, np.float32, "hidden32")
    mask = graph.cast("attention_mask", np.float32, "mask32")
    if prompt_length:
        length = graph.add("Shape", ["input_ids"], "length", start=1, end=2)
        numbers = [graph.constant(f"number{value}", np.array(value)) for value in (0, 1)]
        end = graph.add("Squeeze", [length], "length_scalar")
        places = graph.add("Range", [numbers[0], end, numbers[1]], "places")
        kept = graph.add("GreaterOrEqual", [places, "prompt_length"], "kept")
        mask = graph.add("Mul", [mask, graph.cast(kept, np.float32, "kept32")], "mask_kept")
    columns = graph.add("Unsqueeze", [mask, graph.constant("last", np.array([-1]))], "mask_columns")
    axis = graph.constant("length_axis", np.array([1]))
    total = graph.add("ReduceSum", [graph.add("Mul", [wide, columns], "counted"), axis], "total", keepdims=0)
    count = graph.add("ReduceSum", [columns, axis], "count", keepdims=0)
    graph.add(
        "Div", [total, graph.add("Max", [count, graph.constant("tiny", np.array(1e-9, np.float32))], "n")], output
    )


def _serialized(graph: _Graph, output: str, shape: list[str | int], tokens: bool, prompt_length: bool) -> bytes:
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in names]
    if prompt_length:
        inputs.append(helper.make_tensor_value_info("prompt_length", TensorProto.INT64, []))
    kind = TensorProto.FLOAT16 if tokens else TensorProto.FLOAT
    outputs = [helper.make_tensor_value_info(output, kind, shape)]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 1)]
    made = helper.make_graph(graph.nodes, "encoder", inputs, outputs, graph.constants)
    return bytes(helper.make_model(made, opset_imports=opsets, ir_version=9).SerializeToString())
