"""The CPU graph of a plan: fused for onnxruntime, with its weights in the GPU model's file.

    model.onnx   ...| name | FP16 bytes |...
    cpu.onnx               ^ offset, length -> Cast to FP32 -> MatMul

onnxruntime widens them to FP32 once, while it loads the graph.
"""

from __future__ import annotations

import onnx_ir as ir

from sbert_infer.export.precision.borrowed_weights import Lender


def make_cpu_graph(fused: ir.Model, half_model: bytes, dtype: ir.DataType = ir.DataType.FLOAT16) -> bytes:
    """Let `fused` take its matrices from `half_model`, the GPU's, and serialize it.

    Matrices that it lacks are kept inline in its `dtype`, biases and norms, which are small, in
    FP32. `fused` itself is changed.
    """
    lender = Lender(half_model)
    for value in list(fused.graph.initializers.values()):
        if value.const_value is None or value.dtype != ir.DataType.FLOAT or len(value.const_value.shape) < 2:
            continue
        _replace(fused.graph, value, lender.borrow(value.const_value.numpy().astype(dtype.numpy())))
    serialized: bytes = ir.to_proto(fused).SerializeToString()
    return serialized


def _replace(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Replace the constant `value` by the narrower `tensor`; its users still get FP32."""
    name = f"{value.name}.half"
    half = ir.Value(name=name, shape=value.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    widen = ir.node("Cast", [half], {"to": ir.DataType.FLOAT})
    widened = widen.outputs[0]
    widened.name, widened.shape, widened.type = value.name, value.shape, value.type
    ir.convenience.replace_all_uses_with(value, widened)
    del graph.initializers[str(value.name)]
    graph.initializers[name] = half
    graph.insert_before(graph[0], widen)
