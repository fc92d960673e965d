"""FP16 or BF16 arithmetic on a CPU that has none: all such tensors as FP32 numbers, rounded.

onnxruntime runs FP16 graphs on any CPU, but widens them and omits the rounding between nodes, so
that a model that overflows in FP16 would still give finite vectors; of BF16 it lacks most
operators. Here the rounding is explicit, after each node that computes something. Inside a node it
is FP32, as in the matrix units of a GPU. Run it with onnxruntime's optimizations off: they would
remove the rounding.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

FLOAT = ir.DataType.FLOAT
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Operators that move numbers without changing them.
_MOVES = {"Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "Slice", "Split", "Squeeze"}
_MOVES |= {"Transpose", "Unsqueeze", "Where"}


def emulate_half(model: bytes) -> ir.Model:
    """The serialized FP16 or BF16 `model` in FP32 with rounding. Its outputs are FP32 as well."""
    typed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))  # so that all types are known
    emulated = ir.from_proto(typed)
    graph = emulated.graph
    for value in graph.initializers.values():
        if value.dtype in NARROW and value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            value.dtype = FLOAT
    for node in list(graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() in NARROW:
            node.attributes["to"] = ir.AttrInt64("to", FLOAT)
        for output in node.outputs:
            if (narrow := output.dtype) in NARROW:
                output.dtype = FLOAT
                if node.op_type not in _MOVES:
                    _round(graph, node, output, narrow)
    return emulated


def _round(graph: ir.Graph, node: ir.Node, output: ir.Value, dtype: ir.DataType) -> None:
    narrow = ir.node("Cast", [output], {"to": dtype})
    widen = ir.node("Cast", [narrow.outputs[0]], {"to": FLOAT})
    rounded = widen.outputs[0]
    rounded.shape, rounded.type = output.shape, ir.TensorType(FLOAT)
    if output.is_graph_output():
        rounded.name, output.name = output.name, f"{output.name}.exact"
    ir.convenience.replace_all_uses_with(output, rounded, replace_graph_outputs=True)
    narrow.replace_input_with(0, output)
    graph.insert_after(node, [narrow, widen])
