"""BF16 for CPUs: an FP32 graph of standard operators that stores its matrices in BF16.

    weight (BF16) -> Cast to FP32 -> MatMul

OpenVINO removes the casts and multiplies in BF16; onnxruntime widens the weights to FP32 once,
while it loads the graph. Biases and norms, which are small, stay FP32.

A softmax over the last axis adds in an order that depends on the length of the padding, and where a
sum is rounded to BF16 that shows. Over another axis, each column is added from its first row to its
last, and the zeros of padding come last: so attention's scores are computed transposed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

_LARGE = 4096  # numbers; a smaller constant is not worth a node
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Where"}


def to_bf16(model: ir.Model) -> ir.Model:
    """Change `model`, a portable FP32 graph, in place; return it."""
    graph = model.graph
    graph.initializers.pop("prompt_length", None)  # OpenVINO takes an input with a default for a constant
    for node in list(graph):
        if node.op_type == "Softmax":
            _transpose_softmax(graph, node)
    RemoveUnusedNodesPass()(model)
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None and value.dtype == ir.DataType.FLOAT and len(tensor.shape) > 1 and tensor.size >= _LARGE:
            _narrow(graph, value, tensor.numpy().astype(ir.DataType.BFLOAT16.numpy()))
    return model


def _narrow(graph: ir.Graph, value: ir.Value, numbers: npt.NDArray[np.generic]) -> None:
    """Store the constant `value` as these BF16 `numbers`; its users still get FP32."""
    name = str(value.name)
    tensor = ir.tensor(numbers, name=f"{name}.bf16")
    narrow = ir.Value(name=tensor.name, shape=value.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    cast = ir.node("Cast", [narrow], {"to": ir.DataType.FLOAT})
    wide = cast.outputs[0]
    del graph.initializers[name]
    wide.name, wide.shape, wide.type = name, value.shape, value.type
    ir.convenience.replace_all_uses_with(value, wide)
    graph.initializers[str(narrow.name)] = narrow
    graph.insert_before(graph[0], cast)


def _transpose_softmax(graph: ir.Graph, node: ir.Node) -> None:
    """Let attention's softmax `node` [batch, heads, queries, keys] run on the transposed scores."""
    scores, output = node.inputs[0], node.outputs[0]
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    if scores is None or _rank(scores) != 4 or axis not in (-1, 3):
        return
    tape = ir.tape.Tape()
    turned = _Turn(tape).turn(scores)
    probabilities = tape.op("Softmax", [turned], {"axis": 2})
    back = tape.op("Transpose", [probabilities], {"perm": [0, 1, 3, 2]})
    back.shape, back.type = output.shape, output.type
    ir.convenience.replace_all_uses_with(output, back)
    graph.insert_before(node, tape.nodes)


class _Turn:
    """Swaps the last two axes of values. Where they are computed, they are computed like that."""

    def __init__(self, tape: ir.tape.Tape) -> None:
        self._tape = tape

    def turn(self, value: ir.Value) -> ir.Value:
        """Return `value` with its last two axes swapped."""
        producer = value.producer()
        name = "" if producer is None else producer.op_type
        inputs = [] if producer is None else [each for each in producer.inputs if each is not None]
        ranks = [_rank(each) for each in inputs]
        if name == "MatMul" and min(ranks) > 1:
            return self._tape.op("MatMul", [self.turn(inputs[1]), self.turn(inputs[0])])
        if name in _ELEMENTWISE and all(rank == 0 or rank > 1 for rank in ranks):
            turned = [self.turn(each) if rank else each for each, rank in zip(inputs, ranks, strict=True)]
            return self._tape.op(name, turned)
        order = list(range(_rank(value)))
        if producer is not None and name == "Transpose" and "perm" in producer.attributes:
            value, order = inputs[0], list(producer.attributes["perm"].as_ints())
        order[-2:] = order[:-3:-1]
        return self._tape.op("Transpose", [value], {"perm": order})


def _rank(value: ir.Value) -> int:
    """The number of axes; 1, of which nothing can be turned, if it is unknown."""
    return 1 if value.shape is None else len(value.shape)
