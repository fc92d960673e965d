"""A sample of the vectors in a file, with their texts: Parquet, or .npy beside a file of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from sbert_infer.embed.read.parts import first_texts
from sbert_infer.errors import EmbedError

Array = npt.NDArray[np.float32]

_ROW_GROUPS = 8  # of a Parquet file that are read, evenly spaced: a wrong part shows


@dataclass(frozen=True)
class Sample:
    """Some texts, and the vectors that a file has for them, [texts, dim]."""

    texts: list[str]
    vectors: Array


def read_sample(
    path: Path, count: int, *, text_column: str, embedding_column: str, texts_from: Path | None = None
) -> Sample:
    """Return up to `count` rows of `path`; raise `EmbedError` if they can't be compared."""
    if path.suffix != ".npy":
        return _of_parquet(path, count, text_column, embedding_column, texts_from)
    if texts_from is None:
        raise EmbedError(f"{path} holds no texts: name the file that it was made from with --texts")
    try:
        vectors = np.lib.format.open_memmap(path, "r")
    except ValueError as error:
        raise EmbedError(f"{path} is no readable Parquet or .npy file: {error}") from error
    return _beside(path, np.atleast_1d(vectors), texts_from, text_column, count)


def _of_parquet(path: Path, count: int, text: str, embedding: str, texts_from: Path | None) -> Sample:
    try:
        file = pq.ParquetFile(path)
    except Exception as error:  # pyarrow raises many kinds on files that are no Parquet
        raise EmbedError(f"{path} is no readable Parquet or .npy file: {error}") from error
    names = file.schema_arrow.names
    if embedding not in names:
        raise EmbedError(f"{path} has no column {embedding!r}: see --embedding-column (there are: {', '.join(names)})")
    if texts_from is not None:
        first = file.read_row_group(0, columns=[embedding]) if file.num_row_groups else None
        return _beside(path, [] if first is None else first[embedding].to_pylist(), texts_from, text, count)
    if text not in names:
        there = f"there are: {', '.join(names)}"
        raise EmbedError(f"{path} has no column {text!r}: see --text-column and --texts ({there})")
    groups = sorted({int(at) for at in np.linspace(0, max(0, file.num_row_groups - 1), _ROW_GROUPS)})
    tables = [file.read_row_group(group, columns=[text, embedding]) for group in groups if file.num_row_groups]
    share = -(-count // max(1, len(tables)))
    rows = [row for table in tables for row in _spaced(table.filter(table[embedding].is_valid()), share).to_pylist()]
    whole = [row for row in rows if isinstance(row[text], str)]
    return _sample(path, [row[text] for row in whole], [row[embedding] for row in whole])


def _spaced(table: Any, count: int) -> Any:
    """Return up to `count` rows, evenly spaced."""
    return table.take(np.linspace(0, len(table) - 1, min(count, len(table))).astype(np.int64))


def _beside(path: Path, vectors: Any, texts_from: Path, text_column: str, count: int) -> Sample:
    """Take texts from another file, whose readable rows have these vectors in the same order."""
    texts = first_texts(texts_from, text_column)
    known = min(len(texts), len(vectors))
    rows = [int(row) for row in np.linspace(0, known - 1, min(count, known))]
    return _sample(path, [texts[row] for row in rows], [vectors[row] for row in rows])


def _sample(path: Path, texts: list[str], vectors: Sequence[Any]) -> Sample:
    if not texts:
        raise EmbedError(f"{path} has no rows with both a text and a vector")
    try:
        found = np.array(vectors)
    except ValueError as error:
        raise EmbedError(f"{path}: its vectors have different lengths") from error
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.floating):
        # JSON-like lists of Python floats arrive as float64, vectors in fewer bits as integers.
        what = "vectors in 8 bits or 1 bit" if np.issubdtype(found.dtype, np.integer) else "no vectors"
        raise EmbedError(f"{path} holds {what}: only those with --precision float32 can be compared")
    return Sample(texts, found.astype(np.float32))
