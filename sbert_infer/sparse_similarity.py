"""The four similarity functions of sentence-transformers, on sparse vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.encode.sparse import scipy_sparse

__all__ = ["sparse_pairwise_similarity", "sparse_similarity"]

Array = npt.NDArray[np.float32]


def sparse_similarity(name: str, a: Any, b: Any) -> Array:
    """All pairs: CSR [n, dim], CSR [m, dim] -> [n, m]."""
    if name == "manhattan":  # row by row, as there is no product for it
        return np.stack([_distances(name, a[[row] * b.shape[0]] - b) for row in range(a.shape[0])])
    if name == "cosine":
        a, b = _unit_rows(a), _unit_rows(b)
    if name != "euclidean":
        products: Array = (a @ b.T).toarray()
        return products
    a, b = a.astype(np.float64), b.astype(np.float64)  # small distances are differences of large squares
    squares = _squares(a)[:, None] + _squares(b)[None, :] - 2 * (a @ b.T).toarray()
    distances: Array = -np.sqrt(np.maximum(squares, 0)).astype(np.float32)
    return distances


def sparse_pairwise_similarity(name: str, a: Any, b: Any) -> Array:
    """Row by row: CSR [n, dim] twice -> [n]."""
    if name in ("manhattan", "euclidean"):
        return _distances(name, a - b)
    if name == "cosine":
        a, b = _unit_rows(a), _unit_rows(b)
    return np.asarray(a.multiply(b).sum(axis=1)).ravel()


def _distances(name: str, difference: Any) -> Array:
    if name == "euclidean":
        return -np.sqrt(_squares(difference))
    return -np.asarray(abs(difference).sum(axis=1)).ravel()


def _squares(rows: Any) -> Array:
    return np.asarray(rows.multiply(rows).sum(axis=1)).ravel()


def _unit_rows(rows: Any) -> Any:
    return scipy_sparse().diags(1 / np.maximum(np.sqrt(_squares(rows)), np.float32(1e-12))) @ rows
