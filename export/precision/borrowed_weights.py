"""Constants of a graph that are ranges of bytes in another model's file.

    model.onnx   ...| name | FP16 bytes |...| name | FP16 bytes |...
    cpu.onnx               ^ offset, length

They are ONNX external data: each names a file beside it, an offset and a length. That the file is
an ONNX model itself makes no difference to a reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from sbert_infer.artifact.plan_file import MODEL
from sbert_infer.artifact.protobuf import fields
from sbert_infer.export.graph.constants import digest

Array = npt.NDArray[np.generic]

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers of ModelProto, GraphProto, TensorProto


class Lender:
    """The constants of a serialized model, found by their content."""

    def __init__(self, model: bytes) -> None:
        self._places = {hashlib.sha256(data).digest(): (offset, len(data)) for offset, data in _raw_data(model)}

    def borrow(self, array: Array) -> ir.TensorProtocol:
        """`array` as a range of bytes of the model's file or, if it is not there, itself."""
        place = self._places.get(digest(array))
        if place is None:
            return ir.tensor(array)
        dtype = ir.DataType.from_numpy(array.dtype)
        return ir.ExternalTensor(MODEL, *place, dtype, shape=ir.Shape(array.shape), name="")


def inline_weights(graph: bytes, files: Mapping[str, bytes]) -> onnx.ModelProto:
    """The serialized `graph` with the ranges of `files` that it borrows as constants of its own."""
    model = onnx.load_model_from_string(graph)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            offset = int(place["offset"])
            tensor.raw_data = files[place["location"]][offset : offset + int(place["length"])]
            del tensor.external_data[:]
            tensor.ClearField("data_location")
    return model


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
