"""Read files with named columns: JSON lines, Parquet, tab- or comma-separated, also gzipped."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from sbert_infer.bench.errors import DatasetError

Record = dict[str, Any]  # lower-case column name -> value

_JSON = (".jsonl", ".json", ".ndjson")
_TEXT = (".tsv", ".csv", ".txt")


def is_table(path: Path) -> bool:
    """Whether `read_records` can read this file, by its name."""
    return path.is_file() and _suffix(path) in (*_JSON, *_TEXT, ".parquet")


def read_records(
    path: Path, headless: Callable[[list[str]], list[str] | None] = lambda first: None
) -> Iterator[Record]:
    """Read the rows.

    `headless` is given the first line of a separated file; if that is already a row, it returns the
    names of the columns.
    """
    try:
        if _suffix(path) == ".parquet":
            yield from _parquet(path)
            return
        opener: Any = gzip.open if path.name.lower().endswith(".gz") else open
        # Lines end only at newlines: other separators are part of a text.
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            yield from _json(path, file) if _suffix(path) in _JSON else _separated(path, file, headless)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(f"{path} is not a whole gzip file: {error}") from error


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _json(path: Path, file: TextIO) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{path} line {number} is not JSON, one object a line: {error}") from error
        if not isinstance(row, dict):
            raise DatasetError(f"{path} line {number} is not a JSON object: {line!r:.60}")
        yield {name.lower(): value for name, value in row.items()}


def _separated(path: Path, file: TextIO, headless: Callable[[list[str]], list[str] | None]) -> Iterator[Record]:
    """Split at tabs without quoting if the first line has a tab, else at commas with quoting."""
    first = file.readline()
    rows = _rows(path, chain([first], file), tabs="\t" in first)
    header = next(rows)
    names = headless(header)
    if names is not None:
        yield _named(path, 1, names, header)
    names = names or [name.strip().lower() for name in header]
    for number, row in enumerate(rows, 2):
        if row and row != [""]:
            yield _named(path, number, names, row)


def _rows(path: Path, lines: Iterable[str], *, tabs: bool) -> Iterator[list[str]]:
    if tabs:
        yield from (line.rstrip("\r\n").split("\t") for line in lines)
        return
    reader = csv.reader(lines)
    try:
        yield from reader
    except csv.Error as error:
        raise DatasetError(f"{path} line {reader.line_num}: {error}") from error


def _named(path: Path, number: int, names: list[str], row: list[str]) -> Record:
    if len(row) < len(names):
        raise DatasetError(f"{path} row {number} has {len(row)} columns instead of {len(names)}: {row!r:.60}")
    return dict(zip(names, row, strict=False))  # some rows of some files have extra columns


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(f"{path} needs pyarrow: pip install pyarrow") from error
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from ({name.lower(): value for name, value in row.items()} for row in batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path} can't be read: {error}") from error
