"""The four similarity functions of sentence-transformers, on numpy arrays or, where the caller has them, on tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SIMILARITIES", "pairwise_similarity", "similarity", "unit_rows"]

Array = npt.NDArray[np.floating[Any]]

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def similarity(name: str, a: Any, b: Any) -> Any:
    """All pairs: `a` [n, dim], `b` [m, dim] -> [n, m]. One vector counts as a collection of one."""
    return _apply(_MATRIX[name], a, b)


def pairwise_similarity(name: str, a: Any, b: Any) -> Any:
    """Row by row: `a` [n, dim], `b` [n, dim] -> [n]."""
    return _apply(_ROWS[name], a, b)


def _apply(function: Callable[[Array, Array], Array], a: Any, b: Any) -> Any:
    """Numpy in, numpy out; a tensor among the inputs makes the result a tensor on its device."""
    result = function(_rows(a), _rows(b))
    torch = sys.modules.get("torch")  # a caller who holds a tensor has imported it
    for x in (a, b):
        first = x[0] if isinstance(x, (list, tuple)) and len(x) else x
        if torch is not None and isinstance(first, torch.Tensor):
            return torch.from_numpy(result).to(first.device)
    return result


def _rows(x: Any) -> Array:
    """A vector, a matrix or a list of vectors as [n, dim], in at least single precision."""
    if isinstance(x, (list, tuple)):
        x = np.stack([_rows(row)[0] if np.ndim(row) == 1 else np.asarray(row) for row in x])
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = (x if x.element_size() >= 4 else x.float()).numpy()  # numpy has no bfloat16
    array = np.asarray(x)
    if array.dtype.kind != "f" or array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    return np.atleast_2d(array)


def unit_rows(x: Array) -> Array:
    """Each row scaled to length 1; a zero row stays zero."""
    unit: Array = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return unit


def _euclidean(a: Array, b: Array) -> Array:
    squares = (a * a).sum(1)[:, None] + (b * b).sum(1)[None, :] - 2 * (a @ b.T)
    distances: Array = np.sqrt(np.maximum(squares, 0))
    return -distances


def _manhattan(a: Array, b: Array) -> Array:
    # Row by row: all pairs at once would take n * m * dim numbers.
    return -np.stack([np.abs(row - b).sum(1) for row in a]) if len(a) else np.zeros((0, len(b)), a.dtype)


_MATRIX: dict[str, Callable[[Array, Array], Array]] = {
    "cosine": lambda a, b: unit_rows(a) @ unit_rows(b).T,
    "dot": lambda a, b: a @ b.T,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
_ROWS: dict[str, Callable[[Array, Array], Array]] = {
    "cosine": lambda a, b: (unit_rows(a) * unit_rows(b)).sum(1),
    "dot": lambda a, b: (a * b).sum(1),
    "euclidean": lambda a, b: -np.linalg.norm(a - b, axis=1),
    "manhattan": lambda a, b: -np.abs(a - b).sum(1),
}
