"""Read blocks of rows from files of lines: plain text, JSONL, CSV and TSV.

The standard library parses them, not pyarrow, since one bad line must not spoil its neighbours.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from sbert_infer.embed.read.columns import array_of
from sbert_infer.embed.read.rows import ROW, Block, Columns, Problem, text_problem
from sbert_infer.embed.read.sources import Source
from sbert_infer.errors import EmbedError

BLOCK_ROWS = 1024
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
# A quote that is never closed would swallow the rest of the file: a longer row is set aside.
_LONGEST_FIELD = 1 << 24  # characters


@dataclass(frozen=True)
class _Row:
    """A row of a file of lines: its values by column, or why it has none."""

    values: dict[str, Any] | Problem
    line: int
    raw: bytes


def read_lines(source: Source, columns: Columns, base: int) -> Iterator[Block]:
    """Read a file of lines, whose first row has `base` rows before it in the whole input."""
    with source.open() as file:
        rows = _PARSERS[source.format](_without_bom(file, source.path), columns, source.path)
        start = read_bytes = 0
        while taken := list(islice(rows, BLOCK_ROWS)):
            columns.check(_names(taken), source.path, whole=start == 0)
            read_bytes += sum(len(row.raw) for row in taken)
            yield _block(taken, start, base, columns, source.fraction(read_bytes))
            start += len(taken)


def _names(rows: Sequence[_Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows if isinstance(row.values, dict) for name in row.values))


def _without_bom(lines: Iterable[bytes], path: str) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        if number == 0 and line.startswith(_UTF16):
            raise EmbedError(f"{path} is UTF-16: convert it to UTF-8")
        yield line.removeprefix(_BOM) if number == 0 else line


def _text_rows(lines: Iterable[bytes], columns: Columns, path: str) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        text = _decode(line.rstrip(b"\n").removesuffix(b"\r"))
        yield _Row(text if isinstance(text, Problem) else {columns.text: text}, number, line)


def _json_rows(lines: Iterable[bytes], columns: Columns, path: str) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():  # an empty line, such as the last one, is no row
            yield _Row(_json_object(line), number, line)


def _json_object(line: bytes) -> dict[str, Any] | Problem:
    text = _decode(line)
    if isinstance(text, Problem):
        return text
    try:
        values = json.loads(text)
        if "\\u" in text:
            json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return Problem("a lone surrogate")
    except (ValueError, RecursionError) as error:
        return Problem(f"not JSON: {error}")
    return values if isinstance(values, dict) else Problem(f"not a JSON object but {type(values).__name__}")


def _table_rows(lines: Iterable[bytes], columns: Columns, path: str, **dialect: Any) -> Iterator[_Row]:
    taken: list[bytes] = []

    def decoded() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line.decode("utf-8", "surrogateescape")

    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(decoded(), **dialect)
    names: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            fields: list[str] | Problem = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fields = Problem(f"not CSV: {error}")
        raw = b"".join(taken)
        taken.clear()
        if isinstance(fields, Problem) or (names and fields):
            yield _Row(fields if isinstance(fields, Problem) else _fields(names, fields), line, raw)
        elif fields:  # an empty line is no row
            names = _header(fields, columns, path)
            if not columns.header:
                yield _Row(_fields(names, fields), line, raw)


def _header(fields: Sequence[str], columns: Columns, path: str) -> list[str]:
    names = list(fields) if columns.header else [str(number) for number in range(1, len(fields) + 1)]
    if any(text_problem(name, "header") for name in names):
        raise EmbedError(f"{path}: its header is not valid UTF-8: convert it, or use --no-header")
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise EmbedError(
            f"{path}: the header names {', '.join(map(repr, double))} twice: rename one, or use --no-header"
        )
    return names


def _fields(names: Sequence[str], fields: Sequence[str]) -> dict[str, Any] | Problem:
    if len(fields) != len(names):
        return Problem(f"{len(fields)} fields instead of {len(names)}")
    for name, field in zip(names, fields, strict=True):
        if not field.isascii() and text_problem(field, name):
            return Problem(f"{name} is not valid UTF-8")
    return dict(zip(names, fields, strict=True))


_PARSERS: Mapping[str, Callable[..., Iterator[_Row]]] = {
    "text": _text_rows,
    "jsonl": _json_rows,
    "csv": partial(_table_rows, delimiter=",", strict=True),
    "tsv": partial(_table_rows, delimiter="\t", quoting=csv.QUOTE_NONE),  # a quote that begins a field is part of it
}


def _decode(line: bytes) -> str | Problem:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return Problem(f"not valid UTF-8: byte {line[error.start]:#04x} at {error.start}")


def _block(rows: Sequence[_Row], start: int, base: int, columns: Columns, fraction: float) -> Block:
    values = [row.values if isinstance(row.values, dict) else {} for row in rows]
    starts = np.arange(start, start + len(rows))
    names = columns.kept(_names(rows))
    table = {ROW: pa.array(starts + base)} if columns.id is None else {}
    table |= {name: array_of([row.get(name) for row in values]) for name in names}
    texts = [_text(row.values, columns) for row in rows]
    lines, raw = [row.line for row in rows], [row.raw for row in rows]
    return Block(texts, starts, starts + 1, pa.table(table), fraction, lines, raw)


def _text(values: dict[str, Any] | Problem, columns: Columns) -> str | Problem:
    if isinstance(values, Problem):
        return values
    id = None if columns.id is None else values.get(columns.id)
    if columns.text not in values:
        return Problem(f"there is no {columns.text}", id=id)
    text = values[columns.text]
    problem = text_problem(text, columns.text)
    if columns.id is not None and id is None:
        problem = f"{columns.id} is null"
    return Problem(problem, id=id) if problem else text
