"""From parts to the output: one Parquet, `.npy` or JSONL file, put in place in one step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from sbert_infer.embed.write.journal import StoredPart
from sbert_infer.embed.write.origin import ORIGIN, Origin
from sbert_infer.embed.write.vectors import fixed_lists, vectors_of
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.errors import EmbedError, warn

Array = npt.NDArray[Any]
_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_FEW = 100  # ranges learnt from fewer vectors are unstable


@dataclass(frozen=True)
class OutputFile:
    """The file to write."""

    path: Path
    format: str
    compression: str = "zstd"

    @property
    def parts_folder(self) -> Path:
        """The folder in which the output grows."""
        return self.path.with_name(self.path.name + ".parts")

    @property
    def bad_rows(self) -> Path:
        """The file that lists rows without a vector."""
        return self.path.with_name(self.path.name + ".errors.jsonl")

    @property
    def rows(self) -> Path:
        """The file for ids and other columns beside `.npy`, which holds nothing but vectors."""
        return self.path.with_name(self.path.name + ".rows.parquet")

    @property
    def origin(self) -> Path:
        """The file beside JSONL that says from what its vectors were made."""
        return self.path.with_name(self.path.name + ".origin.json")


def make_output(path: Path, format: str | None, compression: str | None) -> OutputFile:
    """Check the options about the output."""
    found = format or _FORMATS.get(path.suffix.lower())
    if found is None:
        raise EmbedError(
            f"{path}: its name does not say what to write: end it in .parquet, .npy or .jsonl, or see --format"
        )
    if found == "jsonl" and compression is not None:
        raise EmbedError("--compression is for Parquet: leave it out, and compress the JSONL afterwards")
    return OutputFile(path, found, compression or OutputFile.compression)


def at_once(precision: str) -> str:
    """The precision of each part: int8 and uint8 need the ranges of the whole corpus first."""
    return "float32" if precision in ("int8", "uint8") else precision


def write_output(output: OutputFile, parts: Sequence[StoredPart], origin: Origin, group_rows: int) -> None:
    """Write all parts, in order, as one file, and from what their vectors were made.

    Parquet has row groups of `group_rows`.
    """
    rows = _Rows(parts, origin.embedding_column, origin.precision, group_rows)
    with staged(output.path) as new:
        if output.format == "parquet":
            _write_parquet(new.path, rows, output.compression, origin)
        elif output.format == "jsonl":
            _write_jsonl(new.path, rows)
            with staged(output.origin) as beside:
                beside.path.write_text(origin.to_json(), encoding="utf-8")
                beside.commit()
        else:
            _write_npy(new.path, rows)
            with staged(output.rows) as beside:
                _write_parquet(beside.path, rows.without_vectors(), output.compression, origin)
                beside.commit()
        new.commit()


def write_bad_rows(output: OutputFile, parts: Sequence[StoredPart]) -> None:
    """List the rows that were set aside. If there are none, there is no file."""
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
    """The rows of all parts, in one schema and the final precision. Reads one part at a time."""

    parts: Sequence[StoredPart]
    column: str
    precision: str
    group_rows: int
    has_vectors: bool = True

    def without_vectors(self) -> _Rows:
        return replace(self, has_vectors=False)

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
                vectors = reduce_precision(vectors_of(table, self.column), self.precision, self._ranges)
                table = table.set_column(place, self.column, fixed_lists(vectors))
            yield conform(table, self.schema)

    def groups(self) -> Iterator[pa.Table]:
        """Yield tables of `group_rows`, wherever parts end, which depends on time."""
        left = self.schema.empty_table()
        for table in self.tables():
            left = pa.concat_tables([left, table])
            while len(left) >= self.group_rows:
                yield left.slice(0, self.group_rows).combine_chunks()
                left = left.slice(self.group_rows)
        if len(left):
            yield left.combine_chunks()

    @cached_property
    def _ranges(self) -> tuple[Array, Array] | None:
        """The range of each dimension over all parts, where the precision needs it."""
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


def _write_parquet(path: Path, rows: _Rows, compression: str, origin: Origin) -> None:
    """Write row groups. Vectors stay uncompressed, since they do not compress."""
    names = [name for name in rows.schema.names if name != rows.column]
    codecs = dict.fromkeys(names, compression) | ({rows.column: "none"} if rows.has_vectors else {})
    schema = rows.schema.with_metadata({ORIGIN: origin.to_json()})
    with pq.ParquetWriter(str(path), schema, compression=codecs, use_dictionary=names) as writer:
        for table in rows.groups():
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
    """Yield `0.25, -1.5, ...` for each vector, with as few digits as restore the same float32."""
    lists = column.combine_chunks()
    texts = lists.flatten().cast(pa.string())
    offsets = pa.array(np.arange(0, len(texts) + 1, lists.type.list_size), pa.int32())
    for numbers in pc.binary_join(pa.ListArray.from_arrays(offsets, texts), ", "):
        yield numbers.as_py()
