"""A sample of the vectors in a file, with their texts: Parquet, or .npy beside a file of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sbert_infer.embed.read.parts import first_texts
from sbert_infer.embed.write.origin import Origin, read_origin
from sbert_infer.embed.write.output import OutputFile
from sbert_infer.errors import EmbedError

Array = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

_ROW_GROUPS = 8  # of a Parquet file that are read, evenly spaced: a wrong part shows
_BATCH_ROWS = 4096  # of a row group that are in memory at once


@dataclass(frozen=True)
class Sample:
    """Some texts, and the vectors that a file has for them, [texts, dim]."""

    texts: list[str]
    vectors: Array


def origin_of(path: Path) -> Origin | None:
    """Return from what `sbert-embed` made a file; None if it did not, or the file can't be read."""
    try:
        return read_origin(OutputFile(path, "npy").rows if path.suffix == ".npy" else path)
    except (pa.ArrowException, OSError, ValueError):
        return None


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
    rows = np.atleast_1d(vectors)
    return _beside(path, len(rows), rows.__getitem__, texts_from, text_column, count)


def _of_parquet(path: Path, count: int, text: str, embedding: str, texts_from: Path | None) -> Sample:
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except Exception as error:  # pyarrow raises many kinds on files that are no Parquet
        raise EmbedError(f"{path} is no readable Parquet or .npy file: {error}") from error
    names = file.schema_arrow.names
    if embedding not in names:
        raise EmbedError(f"{path} has no column {embedding!r}: see --embedding-column (there are: {', '.join(names)})")
    if texts_from is not None:

        def take(rows: Rows) -> list[Any]:
            return [row[embedding] for row in _take(file, [embedding], rows)]

        return _beside(path, file.metadata.num_rows, take, texts_from, text, count)
    if text not in names:
        there = f"there are: {', '.join(names)}"
        raise EmbedError(f"{path} has no column {text!r}: see --text-column and --texts ({there})")
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    starts, groups = np.cumsum([0, *sizes]), _spaced(len(sizes), _ROW_GROUPS)
    share = -(-count // max(1, len(groups)))
    rows = [starts[group] + _spaced(sizes[group], share) for group in groups]
    found = _take(file, [text, embedding], np.concatenate([np.empty(0, np.int64), *rows]))
    whole = [row for row in found if isinstance(row[text], str) and row[embedding] is not None]
    return _sample(path, [row[text] for row in whole], [row[embedding] for row in whole])


def _spaced(total: int, count: int) -> Rows:
    """Return up to `count` numbers below `total`, evenly spaced."""
    return np.linspace(0, total - 1, min(count, total)).astype(np.int64)


def _take(file: pq.ParquetFile, columns: list[str], rows: Rows) -> list[dict[str, Any]]:
    """Return these rows, whose numbers ascend; only a batch of rows is in memory at once."""
    found: list[dict[str, Any]] = []
    end = 0
    for group in range(file.num_row_groups):
        start, end = end, end + file.metadata.row_group(group).num_rows
        wanted = rows[(rows >= start) & (rows < end)]
        if not len(wanted):
            continue
        for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
            here = wanted[(wanted >= start) & (wanted < start + len(batch))] - start
            found += batch.take(pa.array(here)).to_pylist()
            start += len(batch)
            if start > wanted[-1]:
                break
    return found


def _beside(
    path: Path, size: int, take: Callable[[Rows], Sequence[Any]], texts_from: Path, text_column: str, count: int
) -> Sample:
    """Take texts from another file, whose readable rows have these vectors in the same order."""
    texts = first_texts(texts_from, text_column)
    rows = _spaced(min(len(texts), size), count)
    return _sample(path, [texts[row] for row in rows], take(rows))


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
