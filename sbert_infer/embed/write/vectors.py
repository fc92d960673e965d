"""Vectors as a column of a table, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


def fixed_lists(vectors: Array, missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Turn vectors, [rows, dim], into a column, null where `missing` says so."""
    flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    mask = None if missing is None else pa.array(missing)
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1], mask=mask)


def vectors_of(table: pa.Table, column: str) -> Array:
    """The vectors in a column of `table`, [rows, dim]."""
    lists = table[column].combine_chunks()
    size = lists.type.list_size
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False)).reshape(-1, size)
