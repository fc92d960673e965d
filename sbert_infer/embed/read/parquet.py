"""Read blocks of rows from Parquet files. A row group that can't be read is one `Problem`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sbert_infer.embed.read.rows import ROW, Block, Columns, Problem, text_problem
from sbert_infer.embed.read.sources import Source, first_line, resolve
from sbert_infer.errors import EmbedError

BLOCK_ROWS = 4096


def count_rows(source: Source) -> int:
    """The number of rows that a Parquet file's footer states."""
    with _open(source) as file:
        return int(file.metadata.num_rows)


def read_parquet(source: Source, columns: Columns, base: int, skip: int) -> Iterator[Block]:
    """Read a Parquet file from the row group of row `skip` on.

    The file's first row has `base` rows before it in the whole input.
    """
    with _open(source) as file:
        columns.check(file.schema_arrow.names, source.path)
        _check_type(file.schema_arrow.field(columns.text), source.path)
        names = list(dict.fromkeys([columns.text, *columns.kept(file.schema_arrow.names)]))
        start = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if start + rows > skip:
                yield from _read_group(file, group, names, columns, start, base)
            start += rows


def _open(source: Source) -> pq.ParquetFile:
    try:
        filesystem, path = resolve(source.path)
        return pq.ParquetFile(path, filesystem=filesystem, page_checksum_verification=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise EmbedError(f"{source.path} is not a readable Parquet file: {first_line(error)}") from error


def _check_type(field: pa.Field, path: str) -> None:
    type = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if not (_is_string(type) or _is_binary(type) or pa.types.is_null(type)):
        raise EmbedError(f"{path}: column {field.name!r} holds {field.type}, not text; see --text-column")


def _read_group(
    file: pq.ParquetFile, group: int, names: list[str], columns: Columns, start: int, base: int
) -> Iterator[Block]:
    """Read the blocks of a row group. From the first unreadable row on, it is one problem."""
    total, end = file.metadata.num_rows, start + file.metadata.row_group(group).num_rows
    try:
        for batch in file.iter_batches(BLOCK_ROWS, row_groups=[group], columns=names, use_threads=False):
            table = _with_plain_text(pa.Table.from_batches([batch]), columns.text)
            rows = np.arange(start, start + len(batch))
            texts = _texts(table, columns)
            start += len(batch)
            yield Block(texts, rows, rows + 1, _carried(table, columns, rows + base), start / total)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # the disk or the network, not the content
            raise
        problem = Problem(f"row group {group} can't be read: {first_line(error)}", rows=end - start)
        table = pa.table([pa.nulls(1, file.schema_arrow.field(name).type) for name in names], names)
        carried = _carried(table, columns, np.array([start + base]))
        yield Block([problem], np.array([start]), np.array([end]), carried, end / total)


def _carried(table: pa.Table, columns: Columns, numbers: npt.NDArray[np.int64]) -> pa.Table:
    carried = table.select(columns.kept(table.schema.names))
    return carried if columns.id is not None else carried.add_column(0, ROW, pa.array(numbers))


def _texts(table: pa.Table, columns: Columns) -> list[str | Problem]:
    bad = _invalid_rows(table)
    if columns.id is not None:
        nulls = np.flatnonzero(table[columns.id].is_null().to_numpy())
        bad |= dict.fromkeys(nulls.tolist(), f"{columns.id} is null")
    column = table[columns.text]
    values = [None if row in bad else column[row].as_py() for row in range(len(column))] if bad else column.to_pylist()
    texts: list[str | Problem] = []
    for row, value in enumerate(values):
        reason = bad.get(row) or text_problem(value, columns.text)
        texts.append(Problem(reason, id=_id(table, columns, row)) if reason else value)
    return texts


def _with_plain_text(table: pa.Table, name: str) -> pa.Table:
    """Convert texts that are stored as a dictionary, or as bytes not marked as text."""
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if _is_binary(column.type):
        column = column.cast(pa.large_string(), safe=False)  # checked afterwards, row by row
    return table.set_column(table.schema.get_field_index(name), name, column)


def _invalid_rows(table: pa.Table) -> dict[int, str]:
    """The rows with a string that is not UTF-8, which Parquet allows."""
    try:
        table.validate(full=True)
        return {}
    except pa.ArrowInvalid:
        strings = [name for name in table.schema.names if _is_string(table[name].type)]
        return {row: f"{name} is not valid UTF-8" for name in strings for row in _undecodable(table[name])}


def _undecodable(column: pa.ChunkedArray) -> Iterator[int]:
    for row, scalar in enumerate(column):
        try:
            scalar.as_py()
        except UnicodeDecodeError:  # noqa: PERF203
            yield row


def _id(table: pa.Table, columns: Columns, row: int) -> object:
    try:
        return None if columns.id is None else table[columns.id][row].as_py()
    except UnicodeDecodeError:
        return None


def _is_string(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type))


def _is_binary(type: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type) or pa.types.is_large_binary(type) or pa.types.is_binary_view(type))
