"""The CPU graph of a plan: fused for onnxruntime, with its weights in the GPU model's file.

    model.onnx   ...| name | FP16 bytes |...| name | FP16 bytes |...
    cpu.onnx               ^ offset, length -> Cast to FP32 -> MatMul

The weights may also be BF16. Its large constants are ONNX external data: each names a range of bytes in the file beside it, which
is an ONNX model itself. onnxruntime widens them to FP32 once, while it loads the graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sbert_infer.artifact.plan_file import MODEL
from sbert_infer.artifact.protobuf import fields
from sbert_infer.export.graph.constants import digest

Array = npt.NDArray[np.generic]

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers of ModelProto, GraphProto, TensorProto


def make_cpu_graph(fused: ir.Model, half_model: bytes, dtype: npt.DTypeLike = np.float16) -> bytes:
    """Let `fused` take its matrices from `half_model`, the GPU's, and serialize it.

    Matrices that it lacks are kept inline in its `dtype`, biases and norms, which are small, in
    FP32. `fused` itself is changed.
    """
    stored = {hashlib.sha256(data).digest(): (offset, len(data)) for offset, data in _raw_data(half_model)}
    for value in list(fused.graph.initializers.values()):
        if value.const_value is None or value.dtype != ir.DataType.FLOAT or len(value.const_value.shape) < 2:
            continue
        narrow = value.const_value.numpy().astype(dtype)
        place = stored.get(digest(narrow))
        _replace(fused.graph, value, _external(narrow, place) if place else ir.tensor(narrow))
    serialized: bytes = ir.to_proto(fused).SerializeToString()
    return serialized


def _raw_data(model: bytes) -> Iterator[tuple[int, memoryview]]:
    """Offset and bytes of each of the graph's constants in the serialized `model`."""
    whole = memoryview(model)
    for graph in _children(whole, _GRAPH):
        for tensor in _children(graph, _INITIALIZER):
            for data in _children(tensor, _RAW_DATA):
                if len(data):
                    yield _address(data) - _address(whole), data


def _children(message: memoryview, number: int) -> Iterator[memoryview]:
    return (content for found, content in fields(message) if found == number)


def _address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data


def _external(array: Array, place: tuple[int, int]) -> ir.ExternalTensor:
    """`array` as a range of bytes, (offset, length), of the GPU model's file."""
    dtype = ir.DataType.from_numpy(array.dtype)
    return ir.ExternalTensor(MODEL, *place, dtype, shape=ir.Shape(array.shape), name="")


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
