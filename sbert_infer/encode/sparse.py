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
from sbert_infer.encode.results import import_torch, to_torch
from sbert_infer.similarity import as_csr, scipy_sparse
from sbert_infer.text.tokenizer import TokenizedTexts

Row = tuple[npt.NDArray[np.int32], Array]  # dimensions, ascending, and their values

# Most numbers in a batch's vectors while they are still dense: 16 MB per worker. If only tokens
# were limited, a batch of 512 tokens in texts of three tokens would be 170 vectors, which take
# 170 MB with the 250,002 dimensions of XLM-R.
_MAX_BATCH_NUMBERS = 2**22


class SparseOutput(Output):
    """The largest `max_active_dims` values of each vector; None for all."""

    names = (SPARSE,)

    def __init__(self, manifest: Manifest, max_active_dims: int | None = None) -> None:
        self.dim = manifest.dim
        self.max_active_dims = check_active_dims(max_active_dims)
        self.max_batch_texts = max(1, _MAX_BATCH_NUMBERS // manifest.dim)

    @classmethod
    def of(
        cls, manifest: Manifest, options: EncodeOptions, truncate_dim: int | None, max_active_dims: int | None
    ) -> SparseOutput:
        """Return the output that `options` ask for; refuse options that are for dense vectors.

        `max_active_dims` is what the engine takes if the options name none.
        """
        options.refuse(
            "normalize_embeddings truncate_dim precision output_value out token_pooling",
            f"not for {manifest.name}, whose vectors are sparse",
            truncate_dim=truncate_dim,
        )
        if _wants_csr(options):
            scipy_sparse()  # raises before the work is done if scipy is missing
        else:
            import_torch()
        return cls(manifest, max_active_dims if options.max_active_dims is None else options.max_active_dims)

    def collect(self, tokenized: TokenizedTexts) -> SparseRows:
        """Return empty rows for these texts."""
        return SparseRows(len(tokenized.lengths), self.dim, self.max_active_dims)

    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> Any:
        """Return a CSR matrix, or tensors as in sentence-transformers. One text gives one row."""
        whole = SparseRows.of([row for window in windows for row in window.vectors], self.dim)
        if _wants_csr(options):
            return whole.to_csr()
        as_one = options.convert_to_numpy is None if options.convert_to_tensor is None else options.convert_to_tensor
        if options.convert_to_sparse_tensor is False:
            dense = whole.to_dense() if count else np.empty(0, np.float32)
            tensors = to_torch(dense, as_list=not as_one)
            return tensors[0] if single else tensors
        if single or not as_one:
            return whole.to_tensors()[0] if single else whole.to_tensors()
        return whole.to_tensor()


def _wants_csr(options: EncodeOptions) -> bool:
    """Whether a CSR matrix is wanted.

    It is unless an argument of `SparseEncoder.encode` is given, or `convert_to_numpy=False`.
    """
    tensors = (options.convert_to_tensor, options.convert_to_sparse_tensor, options.save_to_cpu)
    if options.convert_to_numpy is None:
        return all(value is None for value in tensors)
    if options.convert_to_numpy and options.convert_to_sparse_tensor is not None:
        raise ValueError("convert_to_numpy=True gives a CSR matrix: leave convert_to_sparse_tensor out")
    return options.convert_to_numpy and not options.convert_to_tensor


def check_active_dims(value: Any) -> int | None:
    """Return `value`; raise unless it is None or a positive number of dimensions."""
    if value is not None and (not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1):
        raise ValueError(f"max_active_dims must be at least 1, got {value!r}")
    return None if value is None else int(value)


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
        return [_sparse_tensor(dims[None], values, (self.dim,)) for dims, values in self._rows]

    def to_tensor(self) -> Any:
        """Return one sparse torch tensor [rows, dim]."""
        torch = import_torch()
        return torch.stack(self.to_tensors()).coalesce() if len(self) else torch.empty(0).to_sparse()


def _sparse_tensor(where: npt.NDArray[Any], values: Array, shape: tuple[int, ...]) -> Any:
    """Return a sparse tensor of these values; the places `where`, [dimensions, values], ascend."""
    torch = import_torch()
    indices = torch.from_numpy(where.astype(np.int64))
    return torch.sparse_coo_tensor(indices, torch.from_numpy(values), shape, is_coalesced=True, check_invariants=False)


def _largest(dims: npt.NDArray[np.int32], values: Array, most: int | None) -> Row:
    """Return the `most` values of largest magnitude, or all if any of them is not finite.

    NaN and infinity must stay, so that they are noticed later.
    """
    if most is None or len(values) <= most or not np.isfinite(values).all():
        return dims, values
    kept = np.sort(np.argpartition(-np.abs(values), most - 1)[:most])
    return dims[kept], values[kept]


# What may be done with the vectors afterwards ----------------------------------------------------


def decode(embeddings: Any, token_of: Callable[[int], str | None], top_k: int | None = None) -> list[Any]:
    """Return the words of each vector with their weights, heaviest first.

    A vector [dim] gives a list of words, several vectors a list of such lists.
    """
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    rows, found = as_csr(embeddings), []
    for start, stop in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        dims, values = rows.indices[start:stop], rows.data[start:stop]
        order = np.argsort(-values, kind="stable")[:top_k]
        found.append([(token_of(int(dims[i])) or f"[{dims[i]}]", float(values[i])) for i in order])
    return found[0] if _is_one(embeddings) else found


def sparsity(embeddings: Any) -> dict[str, float]:
    """Return the mean number of active dimensions, and the share of those that are not active."""
    rows = as_csr(embeddings)
    if not rows.shape[0] or not rows.shape[1]:
        return {"active_dims": 0.0, "sparsity_ratio": 1.0}
    active = float(np.mean(np.diff(rows.indptr), dtype=np.float32))
    return {"active_dims": active, "sparsity_ratio": 1.0 - active / rows.shape[1]}


def intersection(one: Any, others: Any) -> Any:
    """Multiply one vector with each of `others`; only positive products stay.

    The result has the shape of `others`: a sparse tensor if they are tensors, else a CSR matrix.
    """
    row, rows = as_csr(one), as_csr(others)
    if row.shape[0] != 1:
        raise ValueError(f"intersection compares one vector with others, got {row.shape[0]} as the first argument")
    if row.shape[1] != rows.shape[1]:
        raise ValueError(f"the vectors have different lengths: {row.shape[1]} and {rows.shape[1]}")
    common = rows.multiply(row).tocsr()
    common.data[common.data < 0] = 0
    common.eliminate_zeros()
    common.sort_indices()
    first = others[0] if isinstance(others, (list, tuple)) else others
    if not hasattr(first, "detach") or isinstance(first, np.ndarray):
        return common
    places = common.tocoo()
    if _is_one(others):
        return _sparse_tensor(places.col[None], places.data, (rows.shape[1],))
    return _sparse_tensor(np.stack([places.row, places.col]), places.data, rows.shape)


def _is_one(embeddings: Any) -> bool:
    """Whether this is a single vector [dim], not rows of vectors."""
    return getattr(embeddings, "ndim", 2) == 1
