"""Constants in a graph."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

__all__ = ["add_constant"]


def add_constant(graph: ir.Graph, name: str, array: npt.ArrayLike) -> ir.Value:
    """The constant `name` of `graph`; made from `array` at the first call."""
    if name not in graph.initializers:
        tensor = ir.Tensor(np.asarray(array), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.initializers[name] = value
    return graph.initializers[name]
