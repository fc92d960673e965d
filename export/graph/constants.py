"""Constants in a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


def add_constant(graph: ir.Graph, name: str, array: npt.ArrayLike) -> ir.Value:
    """The constant `name` of `graph`, created from `array` at the first call."""
    if name not in graph.initializers:
        tensor = ir.Tensor(np.asarray(array), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.initializers[name] = value
    return graph.initializers[name]


def share_equal_constants(graph: ir.Graph) -> None:
    """Keep one of each: layers that share their weights (ALBERT) are each traced with a copy."""
    kept: dict[Hashable, ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if value.const_value is None or value.is_graph_input() or value.is_graph_output():
            continue
        array = value.const_value.numpy()
        key = (value.const_value.dtype, array.shape, digest(array))
        if key in kept:
            ir.convenience.replace_all_uses_with(value, kept[key])
            del graph.initializers[name]
        kept.setdefault(key, value)


def digest(array: npt.NDArray[np.generic]) -> bytes:
    """The sha256 of the numbers; numpy has no buffer for those of BF16."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()
