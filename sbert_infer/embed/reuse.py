"""Vectors of earlier outputs, found by their texts: an index on disk, in memory that stays flat.

    vectors.parquet.parts/
      reuse.vectors     the vectors of all earlier outputs, one after the other
      reuse.high        the first 8 bytes of each text's hash, sorted
      reuse.low         the other 8 bytes
      reuse.row         which vector each belongs to

Hashes are first dealt to files by their leading bits, and each of those files is sorted in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sbert_infer.embed.read.sources import find_sources
from sbert_infer.embed.write.origin import Origin, read_origin
from sbert_infer.embed.write.vectors import vectors_of
from sbert_infer.errors import EmbedError

Vectors = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

_ROWS = 1 << 12  # read at once
_ROWS_SUFFIX = ".rows.parquet"  # of the file beside `.npy`
_FILES = 64  # to which hashes are dealt: 40 MB each for 100 million texts
_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<i8")])


class EarlierOutput(NamedTuple):
    """A file with texts and their vectors: Parquet, or the Parquet of texts beside `.npy`."""

    path: Path
    rows: Path
    origin: Origin


class KnownVectors:
    """The vectors of earlier outputs in a folder on disk, by their texts."""

    def __init__(self, folder: Path, dim: int) -> None:
        self._folder, self._dim = folder, dim

    @classmethod
    def build(cls, folder: Path, outputs: Sequence[EarlierOutput], dim: int) -> KnownVectors:
        """Copy the vectors of `outputs` into `folder`, and index them."""
        known, count = cls(folder, dim), 0
        with ExitStack() as stack:
            vectors_file = stack.enter_context(known._file("vectors").open("wb"))
            dealt = [stack.enter_context(known._file(f"{number}.dealt").open("w+b")) for number in range(_FILES)]
            for texts, vectors in (pair for output in outputs for pair in _read(output)):
                vectors_file.write(np.ascontiguousarray(vectors).data)
                entries = np.empty(len(texts), _ENTRY)
                entries["high"], entries["low"] = _hashes(texts)
                entries["row"] = np.arange(count, count + len(texts))
                count += len(texts)
                place = entries["high"] // (2**64 // _FILES)
                for each in np.unique(place).tolist():
                    dealt[each].write(entries[place == each].tobytes())
            columns = [stack.enter_context(known._file(name).open("wb")) for name in ("high", "low", "row")]
            for file in dealt:
                file.seek(0)
                entries = np.frombuffer(file.read(), _ENTRY)
                entries = entries[np.lexsort((entries["row"], entries["low"], entries["high"]))]
                for name, column in zip(("high", "low", "row"), columns, strict=True):
                    column.write(entries[name].tobytes())
        for number in range(_FILES):
            known._file(f"{number}.dealt").unlink()
        return known

    def find(self, texts: Sequence[str]) -> tuple[Indices, Vectors]:
        """Return which texts are not here, and an array for all vectors with those that are.

        Of a text that is here several times, it is the first vector. Two texts share a hash of 16
        bytes with odds of 1 to 2**76 among 100 million. Files are mapped for this call only, so
        that their pages do not count as this process's memory.
        """
        found = np.empty((len(texts), self._dim), np.float32)
        highs = self._mapped("high", np.uint64)
        if not len(highs):
            return np.arange(len(texts)), found
        high, low = _hashes(texts)
        place = np.minimum(np.searchsorted(highs, high), len(highs) - 1)
        here = (highs[place] == high) & (self._mapped("low", np.uint64)[place] == low)
        rows = self._mapped("row", np.int64)[place[here]]
        found[here] = self._mapped("vectors", np.float32).reshape(-1, self._dim)[rows]
        return np.flatnonzero(~here), found

    def _mapped(self, name: str, dtype: Any) -> npt.NDArray[Any]:
        path = self._file(name)
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

    def _file(self, name: str) -> Path:
        return self._folder / f"reuse.{name}"


def earlier_outputs(names: Iterable[str], wanted: Origin) -> list[EarlierOutput]:
    """Find the outputs that `names` are, and check that they hold the wanted vectors and texts."""
    return [_checked(path, wanted) for name in names for path in _files(name)]


def _files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        found = [source.path for source in find_sources([name], None) if source.format == "parquet"]
        return [Path(each[: -len(_ROWS_SUFFIX)] if each.endswith(f".npy{_ROWS_SUFFIX}") else each) for each in found]
    if not path.is_file():
        raise EmbedError(f"--reuse {name}: no such file or folder")
    return [path]


def _checked(path: Path, wanted: Origin) -> EarlierOutput:
    if path.suffix.lower() not in (".parquet", ".pq", ".npy"):
        raise EmbedError(f"--reuse reads Parquet and .npy, not {path}")
    rows = path.with_name(path.name + _ROWS_SUFFIX) if path.suffix.lower() == ".npy" else path
    try:
        origin, metadata = read_origin(rows), pq.read_metadata(rows)
        separate = np.lib.format.open_memmap(path, "r") if rows != path else None
    except (pa.ArrowInvalid, ValueError) as error:
        raise EmbedError(f"--reuse {path}: {error}") from error
    if origin is None:
        raise EmbedError(f"--reuse {path}: it does not say from what its vectors are: no output of sbert-embed")
    if differences := origin.differences(wanted):
        models = f"fingerprint {origin.fingerprint.exact}, now {wanted.fingerprint.exact}"
        raise EmbedError(f"--reuse {path}: its vectors are others: {', '.join(differences)} differ ({models})")
    if origin.precision != "float32":
        raise EmbedError(f"--reuse {path}: its vectors are {origin.precision}: only those of float32 can be used again")
    schema = metadata.schema.to_arrow_schema()
    if origin.text_column not in schema.names:
        keep = f"--columns {origin.text_column},..."
        raise EmbedError(f"--reuse {path}: it holds no texts to compare with: {keep} keeps them in an output")
    if separate is None and origin.embedding_column not in schema.names:
        raise EmbedError(f"--reuse {path}: its column {origin.embedding_column} is missing")
    right = (metadata.num_rows, origin.dim), np.dtype(np.float32)
    if separate is not None and (separate.shape, separate.dtype) != right:
        found = f"{list(separate.shape)} numbers of the type {separate.dtype}, not {list(right[0])} of float32"
        raise EmbedError(f"--reuse {path}: it is not what {rows.name} belongs to: it has {found}")
    return EarlierOutput(path, rows, origin)


def _read(output: EarlierOutput) -> Iterator[tuple[list[str], Vectors]]:
    """Yield texts and vectors, some thousand at a time. Rows without a vector are left out.

    Row groups are read one by one: in one go, Arrow would keep the bytes of all of them.
    """
    text, embedding = output.origin.text_column, output.origin.embedding_column
    separate = np.load(output.path, mmap_mode="r") if output.path != output.rows else None
    start = 0
    with pq.ParquetFile(output.rows) as file:
        names = [text] if separate is not None else [text, embedding]
        groups = range(file.num_row_groups)
        batches = (batch for group in groups for batch in file.iter_batches(_ROWS, row_groups=[group], columns=names))
        for batch in batches:
            table = pa.table(batch)
            if separate is None:
                table = table.filter(table[embedding].is_valid())
                vectors = vectors_of(table, embedding)
            else:
                vectors = np.array(separate[start : start + len(table)])
            start += len(table)
            yield _texts(table[text]), vectors


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Return the texts of a column, which is JSON if some rows of the input were no texts."""
    values = column.to_pylist()
    return [json.loads(value) for value in values] if column.type.equals(pa.json_()) else values


def _hashes(texts: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return the two halves of each text's hash, [2, texts]."""
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    halves: npt.NDArray[np.uint64] = np.frombuffer(digests, "<u8").reshape(-1, 2).T
    return halves
