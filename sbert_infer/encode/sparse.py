"""Sparse vectors: what a sparse encoder gives, kept as the few numbers of each that are not zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import SPARSE_ENCODER, Manifest
from sbert_infer.encode.results import Asked, progress_bar
from sbert_infer.similarity import scipy_sparse
from sbert_infer.types import Text

if TYPE_CHECKING:
    from sbert_infer.encode.pipeline import Window
    from sbert_infer.engine import Engine

__all__ = [
    "SparseRows",
    "check_sparse",
    "decode",
    "encode_sparse",
    "is_sparse",
    "max_batch_texts",
    "sparse_rows",
    "sparse_windows",
]

Indices = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Row = tuple[npt.NDArray[np.int32], Vectors]  # dimensions, ascending, and the values there

# Numbers of a batch's vectors while they are still dense: 16 MB a worker. By tokens alone, 512 of
# XLM-R's in texts of three would be 170 vectors of 250,002 numbers, 170 MB.
_MAX_BATCH_NUMBERS = 2**22


class SparseRows:
    """The sparse vectors of texts. Rows are filled in any order and by any thread, each by one."""

    def __init__(self, count: int, dim: int, max_active_dims: int | None = None) -> None:
        """Make `count` empty rows of `dim` numbers, of each of which the largest `max_active_dims` are kept."""
        self.dim = dim
        self._most = max_active_dims
        empty: Row = np.empty(0, np.int32), np.empty(0, np.float32)
        self._rows: list[Row] = [empty] * count

    def __len__(self) -> int:
        return len(self._rows)

    def __setitem__(self, rows: Indices, vectors: Vectors) -> None:
        """Keep what is not zero of `vectors` [rows, dim]."""
        at, dims = np.nonzero(vectors)
        values, dims = vectors[at, dims], dims.astype(np.int32)
        ends = np.searchsorted(at, np.arange(len(vectors) + 1)).tolist()
        for row, start, stop in zip(rows.tolist(), ends[:-1], ends[1:], strict=True):
            self.put(row, dims[start:stop].copy(), values[start:stop].copy())

    def put(self, row: int, dims: npt.NDArray[np.int32], values: Vectors) -> None:
        """Set a row to these numbers, at these dimensions, ascending."""
        self._rows[row] = _largest(dims, values, self._most)

    def __getitem__(self, rows: Indices) -> SparseRows:
        """Some of them, in the given order."""
        taken = SparseRows(0, self.dim, self._most)
        taken._rows = [self._rows[row] for row in rows.tolist()]
        return taken

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def not_finite(self) -> Indices:
        """The rows that have a NaN or an infinity."""
        return np.flatnonzero([not np.isfinite(values).all() for _, values in self._rows])

    def to_dense(self) -> Vectors:
        """[rows, dim]."""
        dense = np.zeros((len(self), self.dim), np.float32)
        for row, (dims, values) in zip(dense, self._rows, strict=True):
            row[dims] = values
        return dense

    def to_csr(self) -> Any:
        """As `scipy.sparse.csr_matrix` [rows, dim]."""
        sparse = scipy_sparse()
        ends = np.cumsum([0, *(len(values) for _, values in self._rows)])
        dims = np.concatenate([np.empty(0, np.int32), *(dims for dims, _ in self._rows)])
        values = np.concatenate([np.empty(0, np.float32), *(values for _, values in self._rows)])
        return sparse.csr_matrix((values, dims, ends), shape=(len(self), self.dim))

    def convert(self, single: bool, asked: Asked) -> Any:
        """As a CSR matrix, which for one text has one row; or as sentence-transformers gives them."""
        if asked.as_arrays:
            return self.to_csr()
        if single:
            return self.to_tensors()[0]
        return self.to_tensor() if asked.convert_to_tensor else self.to_tensors()

    def to_tensors(self) -> list[Any]:
        """As sparse tensors of torch, each [dim]."""
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
        """As one sparse tensor [rows, dim]."""
        import torch

        return torch.stack(self.to_tensors()).coalesce() if len(self) else torch.empty(0).to_sparse()


def _largest(dims: npt.NDArray[np.int32], values: Vectors, most: int | None) -> Row:
    """By magnitude. What is not finite is kept, to be found."""
    if most is None or len(values) <= most or not np.isfinite(values).all():
        return dims, values
    kept = np.sort(np.argpartition(-np.abs(values), most - 1)[:most])
    return dims[kept], values[kept]


# ----------------------------------------------------------------------------------------------------
# encoding


def is_sparse(manifest: Manifest) -> bool:
    """Whether the artifact gives sparse vectors."""
    return manifest.kind == SPARSE_ENCODER


def sparse_rows(manifest: Manifest, max_active_dims: int | None = None) -> Callable[[int], SparseRows]:
    """Makes the rows that the vectors of an artifact go to; `max_active_dims` replaces the model's own."""
    if max_active_dims is not None and max_active_dims < 1:
        raise ValueError(f"max_active_dims must be at least 1, got {max_active_dims}")
    most = manifest.max_active_dims if max_active_dims is None else max_active_dims
    return lambda count: SparseRows(count, manifest.dim, most)


def max_batch_texts(manifest: Manifest, batch_size: int | None = None) -> int:
    """Texts that run together at most, so that their vectors, dense at first, take little memory."""
    most = max(1, _MAX_BATCH_NUMBERS // manifest.dim)
    return most if batch_size is None else min(batch_size, most)


def check_sparse(engine: Engine, asked: Asked) -> None:
    """Refuse what is done to dense vectors only."""
    asked.or_truncated_to(engine.truncate_dim).refuse(
        "normalize_embeddings truncate_dim precision output_value out",
        f"not for {engine.manifest.name}, whose vectors are sparse",
    )
    if asked.as_arrays:
        scipy_sparse()  # or say that it is missing before the work is done


def sparse_windows(
    engine: Engine, texts: Iterable[Text], asked: Asked, progress: Callable[[int], object]
) -> Iterator[Window]:
    """The vectors of `texts`, some thousands at a time; those of a window are `SparseRows`."""
    rows = sparse_rows(engine.manifest, asked.max_active_dims)
    most = max_batch_texts(engine.manifest, asked.batch_size)
    yield from engine._windows(texts, asked.prompt, most, progress, rows)


def encode_sparse(engine: Engine, texts: Iterable[Text], asked: Asked) -> SparseRows:
    """The vectors of `texts`, in order."""
    known, whole = list(texts), SparseRows(0, engine.manifest.dim)
    with progress_bar(len(known), asked.show_progress_bar) as progress:
        for window in sparse_windows(engine, known, asked, progress):
            whole._rows += window.vectors
    return whole


# ----------------------------------------------------------------------------------------------------
# using them


def decode(rows: Any, token_of: Callable[[int], str | None], top_k: int | None = None) -> list[list[tuple[str, float]]]:
    """The words of each row of a CSR matrix with their weights, the heaviest first."""
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    found = []
    for start, stop in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        dims, values = rows.indices[start:stop], rows.data[start:stop]
        order = np.argsort(-values, kind="stable")[:top_k]
        found.append([(token_of(int(dims[i])) or f"[{dims[i]}]", float(values[i])) for i in order])
    return found
