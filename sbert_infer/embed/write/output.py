"""From parts to the output: one Parquet, `.npy` or JSONL file, put in place in one step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbert_infer._util.files import staged
from sbert_infer.embed.read.columns import common_schema, conform, to_json
from sbert_infer.embed.write.journal import StoredPart, fixed_lists
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.errors import EmbedError, warn

__all__ = ["OUTPUT_FORMATS", "Output", "at_once", "write_bad_rows", "write_output"]

Array = npt.NDArray[Any]
OUTPUT_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_FEW = 100  # vectors; ranges learnt from fewer are unstable


@dataclass(frozen=True)
class Output:
    """The file to write."""

    path: Path
    format: str
    compression: str = "zstd"

    @property
    def parts_folder(self) -> Path:
        """Where it grows."""
        return self.path.with_name(self.path.name + ".parts")

    @property
    def bad_rows(self) -> Path:
        """Where rows that have no vector are listed."""
        return self.path.with_name(self.path.name + ".errors.jsonl")

    @property
    def rows(self) -> Path:
        """For `.npy`, which holds nothing but vectors: their ids and other columns."""
        return self.path.with_name(self.path.name + ".rows.parquet")


def at_once(precision: str) -> str:
    """The precision that each part can have; int8 and uint8 need the ranges of the whole corpus first."""
    return "float32" if precision in ("int8", "uint8") else precision


def write_output(output: Output, parts: Sequence[StoredPart], column: str, precision: str) -> None:
    """Write all parts, in order, as one file."""
    rows = _Rows(parts, column, precision)
    with staged(output.path) as new:
        if output.format == "parquet":
            _write_parquet(new.path, rows, output.compression)
        elif output.format == "jsonl":
            _write_jsonl(new.path, rows)
        else:
            _write_npy(new.path, rows)
            with staged(output.rows) as beside:
                _write_parquet(beside.path, rows.without_vectors(), output.compression)
                beside.commit()
        new.commit()


def write_bad_rows(output: Output, parts: Sequence[StoredPart]) -> None:
    """List the rows that were set aside; no file if there are none."""
    lists = [part.bad_path for part in parts if part.stats.bad]
    if not lists:
        output.bad_rows.unlink(missing_ok=True)
        return
    with staged(output.bad_rows) as new:
        with new.path.open("wb") as file:
            for path in lists:
                with path.open("rb") as part:
                    shutil.copyfileobj(part, file)
        new.commit()


@dataclass(frozen=True)
class _Rows:
    """The rows of all parts, with one schema and the final precision. One part at a time is in memory."""

    parts: Sequence[StoredPart]
    column: str
    precision: str
    has_vectors: bool = True

    def without_vectors(self) -> _Rows:
        return _Rows(self.parts, self.column, self.precision, has_vectors=False)

    @cached_property
    def schema(self) -> pa.Schema:
        schema = common_schema(part.schema() for part in self.parts)
        place = schema.get_field_index(self.column)
        if not self.has_vectors:
            return schema.remove(place)
        if at_once(self.precision) == self.precision:
            return schema
        type = pa.list_(pa.int8() if self.precision == "int8" else pa.uint8(), schema.field(place).type.list_size)
        return schema.set(place, pa.field(self.column, type))

    def tables(self) -> Iterator[pa.Table]:
        for part in self.parts:
            table = part.read().replace_schema_metadata()
            place = table.schema.get_field_index(self.column)
            if not self.has_vectors:
                table = table.remove_column(place)
            elif self._ranges is not None:
                table = table.set_column(place, self.column, fixed_lists(self._reduced(table)))
            yield conform(table, self.schema)

    def _reduced(self, table: pa.Table) -> Array:
        return reduce_precision(vectors_of(table, self.column), self.precision, self._ranges)

    @cached_property
    def _ranges(self) -> tuple[Array, Array] | None:
        """The least and greatest values of each dimension over all parts, where the precision needs them."""
        if at_once(self.precision) == self.precision:
            return None
        count = sum(part.stats.texts for part in self.parts)
        if count == 1:
            raise EmbedError(f"--precision {self.precision} needs several texts: its ranges are learnt from them")
        if count < _FEW:
            warn(f"--precision {self.precision}: ranges learnt from only {count} texts are unstable")
        each = [vectors_of(part.read(), self.column) for part in self.parts if part.stats.texts]  # mapped, not read
        low = [vectors.min(axis=0) for vectors in each]
        high = [vectors.max(axis=0) for vectors in each]
        return np.min(low, axis=0, initial=np.inf), np.max(high, axis=0, initial=-np.inf)


def vectors_of(table: pa.Table, column: str) -> Array:
    """The vectors of a table, [rows, dim]."""
    lists = table[column].combine_chunks()
    size = lists.type.list_size
    return np.asarray(lists.flatten().to_numpy(zero_copy_only=False)).reshape(-1, size)


def _write_parquet(path: Path, rows: _Rows, compression: str) -> None:
    """A row group for each part. Vectors are written as they are: they do not compress."""
    names = [name for name in rows.schema.names if name != rows.column]
    codecs = dict.fromkeys(names, compression) | ({rows.column: "none"} if rows.has_vectors else {})
    with pq.ParquetWriter(str(path), rows.schema, compression=codecs, use_dictionary=names) as writer:
        for table in rows.tables():
            writer.write_table(table, row_group_size=max(1, len(table)))


def _write_npy(path: Path, rows: _Rows) -> None:
    type = rows.schema.field(rows.column).type
    shape = (sum(part.stats.texts for part in rows.parts), type.list_size)
    dtype = np.dtype(type.value_type.to_pandas_dtype())
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for table in rows.tables():
            file.write(np.ascontiguousarray(vectors_of(table, rows.column)).data)


def _write_jsonl(path: Path, rows: _Rows) -> None:
    key = to_json(rows.column)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for table in rows.tables():
            carried = table.drop_columns([rows.column]).to_pylist()
            for row, numbers in zip(carried, _number_lists(table[rows.column]), strict=True):
                file.write(f"{to_json(row)[:-1]}, {key}: [{numbers}]}}\n")


def _number_lists(column: pa.ChunkedArray) -> Iterator[str]:
    """`0.25, -1.5, ...` for each vector, in as few digits as give the same float32 again."""
    lists = column.combine_chunks()
    texts = lists.flatten().cast(pa.string())
    offsets = pa.array(np.arange(0, len(texts) + 1, lists.type.list_size), pa.int32())
    for numbers in pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ", "):
        yield numbers.as_py()
