"""The input of a job as a Ray datasource: the same readers, bad rows, and blocks in every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from sbert_infer.embed.read.columns import concat
from sbert_infer.embed.read.lines import read_lines
from sbert_infer.embed.read.parquet import count_rows, read_parquet
from sbert_infer.embed.read.rows import ROW, Block, Columns, Problem
from sbert_infer.embed.read.sources import Source

TEXT, ERROR = "__text__", "error"  # columns
# Row `r` of file `f` has the number `f * FILE_ROWS + r`, unique without counting other files' rows.
FILE_ROWS = 1 << 40


class CorpusDatasource(Datasource):  # type: ignore[misc]
    """Reads blocks of `block_rows` rows: row number, id, carried columns, error, text.

    A Parquet file is read by many tasks, a file of lines by one, since where its rows begin is
    unknown.
    """

    def __init__(self, sources: Sequence[Source], columns: Columns, block_rows: int) -> None:
        super().__init__()
        self._tasks = [
            _task(source, columns, number * FILE_ROWS, begin, block_rows)
            for number, source in enumerate(sources)
            for begin in (range(0, max(1, count_rows(source)), block_rows) if source.format == "parquet" else [0])
        ]
        self._bytes = sum(source.size for source in sources)

    def __len__(self) -> int:
        return len(self._tasks)

    def get_name(self) -> str:
        """The name that Ray shows."""
        return "Corpus"

    def estimate_inmemory_data_size(self) -> int:
        """The bytes of all files, as an estimate."""
        return self._bytes

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """Return all tasks, whatever the parallelism, so that every run reads the same blocks."""
        return self._tasks


def _task(source: Source, columns: Columns, base: int, begin: int, rows: int) -> ReadTask:
    read = _read_range if source.format == "parquet" else _read_file
    metadata = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=(source.path,))
    return ReadTask(partial(read, source, columns, base, begin, rows), metadata)


def _read_range(source: Source, columns: Columns, base: int, begin: int, rows: int) -> Iterator[pa.Table]:
    tables = []
    for block in read_parquet(source, columns, base, begin):
        inside = (block.starts >= begin) & (block.starts < begin + rows)
        if inside.any():
            tables.append(_table(block, columns, base).filter(pa.array(inside)))
        if block.ends[-1] >= begin + rows:
            break
    if tables:
        yield concat(tables)


def _read_file(source: Source, columns: Columns, base: int, begin: int, rows: int) -> Iterator[pa.Table]:
    tables: list[pa.Table] = []
    for block in read_lines(source, columns, base):
        tables.append(_table(block, columns, base))
        if sum(map(len, tables)) >= rows:
            yield concat(tables)
            tables = []
    if tables:
        yield concat(tables)


def _table(block: Block, columns: Columns, base: int) -> pa.Table:
    table = block.carried
    if columns.id is not None:
        table = table.add_column(0, ROW, pa.array(block.starts + base))
    texts = [text if isinstance(text, str) else None for text in block.texts]
    problems = [text.reason if isinstance(text, Problem) else None for text in block.texts]
    table = table.append_column(ERROR, pa.array(problems, pa.string()))
    return table.append_column(TEXT, pa.array(texts, pa.large_string()))
