"""Sparse output: vectors of a sparse encoder, stored as the few values that are not zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import SPARSE, Manifest
from sbert_infer.backends.base import Array
from sbert_infer.encode.options import EncodeOptions
from sbert_infer.encode.output import Collector, Indices, Output, Window
from sbert_infer.similarity import scipy_sparse
from sbert_infer.text.tokenizer import TokenizedTexts

Row = tuple[npt.NDArray[np.int32], Array]  # dimensions, ascending, and their values

# Most numbers in a batch's vectors while they are still dense: 16 MB per worker. If only tokens
# were limited, a batch of 512 tokens in texts of three tokens would be 170 vectors, which take
# 170 MB with the 250,002 dimensions of XLM-R.
_MAX_BATCH_NUMBERS = 2**22


class SparseOutput(Output):
    """The largest `max_active_dims` values of each vector; by default, the model's own setting."""

    names = (SPARSE,)

    def __init__(self, manifest: Manifest, max_active_dims: int | None = None) -> None:
        if max_active_dims is not None and max_active_dims < 1:
            raise ValueError(f"max_active_dims must be at least 1, got {max_active_dims}")
        self.dim = manifest.dim
        self.max_active_dims = manifest.max_active_dims if max_active_dims is None else max_active_dims
        self.max_batch_texts = max(1, _MAX_BATCH_NUMBERS // manifest.dim)

    @classmethod
    def of(cls, manifest: Manifest, options: EncodeOptions, truncate_dim: int | None) -> SparseOutput:
        """Return the output that `options` ask for; refuse options that are for dense vectors."""
        options.refuse(
            "normalize_embeddings truncate_dim precision output_value out",
            f"not for {manifest.name}, whose vectors are sparse",
            truncate_dim=truncate_dim,
        )
        if options.as_arrays:
            scipy_sparse()  # raises before the work is done if scipy is missing
        return cls(manifest, options.max_active_dims)

    def collect(self, tokenized: TokenizedTexts) -> SparseRows:
        """Return empty rows for these texts."""
        return SparseRows(len(tokenized.lengths), self.dim, self.max_active_dims)

    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> Any:
        """Return a CSR matrix, or tensors as in sentence-transformers. One text gives one row."""
        whole = SparseRows.of([row for window in windows for row in window.vectors], self.dim)
        if options.as_arrays:
            return whole.to_csr()
        if single:
            return whole.to_tensors()[0]
        return whole.to_tensor() if options.convert_to_tensor else whole.to_tensors()


class SparseRows(Collector):
    """Sparse vectors, one row for each text."""

    def __init__(self, count: int, dim: int, max_active_dims: int | None = None) -> None:
        """Make `count` empty rows, for at most `max_active_dims` of `dim` values each."""
        self.dim = dim
        self._most = max_active_dims
        empty: Row = np.empty(0, np.int32), np.empty(0, np.float32)
        self._rows: list[Row] = [empty] * count

    @classmethod
    def of(cls, rows: list[Row], dim: int) -> SparseRows:
        """Return an object with these rows, as they are."""
        made = cls(0, dim)
        made._rows = rows
        return made

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        """Store the non-zero values of `found[0]`, [rows, dim]."""
        (vectors,) = found
        at, dims = np.nonzero(vectors)
        values, dims = vectors[at, dims], dims.astype(np.int32)
        ends = np.searchsorted(at, np.arange(len(vectors) + 1)).tolist()
        for row, start, stop in zip(rows.tolist(), ends[:-1], ends[1:], strict=True):
            self.set(row, dims[start:stop].copy(), values[start:stop].copy())
        return rows[np.unique(at[~np.isfinite(values)])]

    def set(self, row: int, dims: npt.NDArray[np.int32], values: Array) -> None:
        """Set a row to `values` at the dimensions `dims`, which must be ascending."""
        self._rows[row] = _largest(dims, values, self._most)

    def result(self, order: Indices | None) -> SparseRows:
        """Return the rows in this order."""
        return self if order is None else SparseRows.of([self._rows[row] for row in order.tolist()], self.dim)

    def to_dense(self) -> Array:
        """Return a dense array [rows, dim]."""
        dense = np.zeros((len(self), self.dim), np.float32)
        for row, (dims, values) in zip(dense, self._rows, strict=True):
            row[dims] = values
        return dense

    def to_csr(self) -> Any:
        """Return a `scipy.sparse.csr_matrix` [rows, dim]."""
        sparse = scipy_sparse()
        ends = np.cumsum([0, *(len(values) for _, values in self._rows)])
        dims = np.concatenate([np.empty(0, np.int32), *(dims for dims, _ in self._rows)])
        values = np.concatenate([np.empty(0, np.float32), *(values for _, values in self._rows)])
        return sparse.csr_matrix((values, dims, ends), shape=(len(self), self.dim))

    def to_tensors(self) -> list[Any]:
        """Return a list of sparse torch tensors, each [dim]."""
        import torch

        return [
            torch.sparse_coo_tensor(
                torch.from_numpy(dims.astype(np.int64)[None]),
                torch.from_numpy(values),
                (self.dim,),
                is_coalesced=True,
                check_invariants=False,
            )
            for dims, values in self._rows
        ]

    def to_tensor(self) -> Any:
        """Return one sparse torch tensor [rows, dim]."""
        import torch

        return torch.stack(self.to_tensors()).coalesce() if len(self) else torch.empty(0).to_sparse()


def _largest(dims: npt.NDArray[np.int32], values: Array, most: int | None) -> Row:
    """Return the `most` values of largest magnitude, or all if any of them is not finite.

    NaN and infinity must stay, so that they are noticed later.
    """
    if most is None or len(values) <= most or not np.isfinite(values).all():
        return dims, values
    kept = np.sort(np.argpartition(-np.abs(values), most - 1)[:most])
    return dims[kept], values[kept]


def decode(rows: Any, token_of: Callable[[int], str | None], top_k: int | None = None) -> list[list[tuple[str, float]]]:
    """Return the words of each row of a CSR matrix with their weights, heaviest first."""
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    found = []
    for start, stop in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        dims, values = rows.indices[start:stop], rows.data[start:stop]
        order = np.argsort(-values, kind="stable")[:top_k]
        found.append([(token_of(int(dims[i])) or f"[{dims[i]}]", float(values[i])) for i in order])
    return found
