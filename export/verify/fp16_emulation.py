"""FP16 arithmetic on a CPU that has none: every FP16 tensor of a graph as FP32 numbers, rounded to FP16.

onnxruntime runs FP16 graphs on any CPU, but widens them and leaves the rounding between nodes out:
of a model that overflows in FP16 it would give finite vectors. Here the rounding is explicit, after
each node that computes something. Inside a node it is FP32, as in the matrix units of a GPU. To be
run with onnxruntime's optimizations off: they would take the rounding out again.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

__all__ = ["emulate_half"]

HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT
# These move numbers about and change none.
_MOVES = {"Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape", "Slice", "Split", "Squeeze"}
_MOVES |= {"Transpose", "Unsqueeze", "Where"}


def emulate_half(model: bytes) -> ir.Model:
    """The serialized FP16 `model` in FP32 with rounding. Its output, too, is FP32."""
    typed = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(model))  # no value may be overlooked
    emulated = ir.from_proto(typed)
    graph = emulated.graph
    for value in graph.initializers.values():
        if value.dtype == HALF and value.const_value is not None:
            value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
            value.dtype = FLOAT
    for node in list(graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() == HALF:
            node.attributes["to"] = ir.AttrInt64("to", FLOAT)
        for output in node.outputs:
            if output.dtype == HALF:
                output.dtype = FLOAT
                if node.op_type not in _MOVES:
                    _round(graph, node, output)
    return emulated


def _round(graph: ir.Graph, node: ir.Node, output: ir.Value) -> None:
    narrow = ir.node("Cast", [output], {"to": HALF})
    widen = ir.node("Cast", [narrow.outputs[0]], {"to": FLOAT})
    rounded = widen.outputs[0]
    rounded.shape, rounded.type = output.shape, ir.TensorType(FLOAT)
    if output.is_graph_output():
        rounded.name, output.name = output.name, f"{output.name}.exact"
    ir.convenience.replace_all_uses_with(output, rounded, replace_graph_outputs=True)
    narrow.replace_input_with(0, output)
    graph.insert_after(node, [narrow, widen])
