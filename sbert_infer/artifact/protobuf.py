"""Just enough of protobuf's wire format to inspect an ONNX file without a native library."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Message -> field number -> message in that field: all paths to a tensor in an ONNX model.
_CHILDREN: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {},
}
_TENSOR_EXTERNAL_DATA = 13


def fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the length-delimited fields of a message as (number, content).

    Raises ValueError on malformed bytes.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _BYTES:
            size, at = _varint(data, at)
            if size > len(data) - at:
                raise ValueError("a field runs past the end of its message")
            yield key >> 3, data[at : at + size]
            at += size
        elif wire == _VARINT:
            _, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
            if at > len(data):
                raise ValueError("a number runs past the end of its message")
        else:
            raise ValueError(f"unknown wire type {wire}")


def bytes_field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field that can be appended to a message."""
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(content)) + content


def external_locations(model: memoryview) -> set[str]:
    """Return the names of the external files that the tensors of an ONNX model are stored in."""
    found: set[str] = set()
    todo: list[tuple[str, memoryview]] = [("Model", model)]
    while todo:
        kind, data = todo.pop()
        for number, content in fields(data):
            if (child := _CHILDREN[kind].get(number)) is not None:
                todo.append((child, content))
            elif kind == "Tensor" and number == _TENSOR_EXTERNAL_DATA:
                entry = {n: bytes(value) for n, value in fields(content)}
                if entry.get(1) == b"location":
                    found.add(entry.get(2, b"").decode("utf-8"))
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number runs past the end of its message")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
