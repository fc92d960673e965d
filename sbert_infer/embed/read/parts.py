"""Cut a stream of rows into parts of equally many texts, each with what resuming after it needs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from sbert_infer.embed.read.columns import concat
from sbert_infer.embed.read.lines import read_lines
from sbert_infer.embed.read.parquet import read_parquet
from sbert_infer.embed.read.rows import Block, Columns, Problem
from sbert_infer.embed.read.sources import STDIN, Source, find_sources, format_of
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.errors import EmbedError

# A part with this many bad rows or characters ends with its window, so that memory stays flat.
_MANY_BAD = 1 << 16
_MANY_CHARACTERS = 1 << 26


@dataclass(frozen=True)
class Position:
    """Where the next part begins."""

    source: int = 0  # index of the file
    source_rows: int = 0  # rows read of that file
    rows: int = 0  # rows read of all files
    digest: str = ""  # sha256 of the bytes read of that file, if it is a file of lines
    fraction: float = 0.0  # fraction of the whole input; NaN if unknown


@dataclass(frozen=True)
class BadRow:
    """A row that has no vector, and its place."""

    file: str
    row: int
    line: int | None
    problem: Problem


@dataclass
class Part:
    """Consecutive rows: texts and columns of the good ones, places of the bad ones."""

    texts: list[str] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    end: Position = Position()
    is_last: bool = False

    def add(self, block: Block, path: str) -> None:
        """Append rows."""
        self.texts += [text for text in block.texts if isinstance(text, str)]
        self.tables.append(block.carried.filter(pa.array(block.good)))
        for index, text in enumerate(block.texts):
            if isinstance(text, Problem):
                line = block.lines[index] if block.lines else None
                self.bad.append(BadRow(path, int(block.starts[index]), line, text))

    def extend(self, following: Part) -> None:
        """Append the part that comes next."""
        self.texts += following.texts
        self.tables += following.tables
        self.bad += following.bad
        self.end, self.is_last = following.end, following.is_last

    def is_full(self, part_texts: int) -> bool:
        """Whether the part should end at the next place where it may."""
        many = len(self.texts) >= part_texts or len(self.bad) >= _MANY_BAD
        return many or sum(map(len, self.texts)) >= _MANY_CHARACTERS

    def carried(self) -> pa.Table:
        """The carried columns, one row for each text."""
        return concat(self.tables)


def cut_parts(
    sources: Sequence[Source], columns: Columns, part_texts: int, start: Position, limit: int | None = None
) -> Iterator[Part]:
    """Cut the rows from `start` to row `limit` of the whole input. The last part may have no texts.

    Where a part ends depends only on the rows before, and is always after a multiple of
    `WINDOW_TEXTS` texts. So the same texts run together whether or not the job was interrupted, and
    vectors are the same to the last bit.
    """
    if part_texts % WINDOW_TEXTS:
        raise ValueError(f"part_texts must be a multiple of {WINDOW_TEXTS}, got {part_texts}")
    cursor, part = _Cursor(sources, start, limit), Part()
    for index, block in _remaining(sources, columns, cursor):
        at = 0
        while at < len(block):
            stop = _after_good(block, at, WINDOW_TEXTS - len(part.texts) % WINDOW_TEXTS)
            part.add(block[at:stop], sources[index].path)
            cursor.advance(index, block[at:stop])
            at = stop
            if len(part.texts) % WINDOW_TEXTS == 0 and part.is_full(part_texts):
                part.end = cursor.position()
                yield part
                part = Part()
    part.end, part.is_last = cursor.position(), True
    yield part


def first_texts(path: Path, text_column: str) -> list[str]:
    """Return the texts among the first few thousand readable rows of a file, maybe plain text."""
    sources = find_sources([str(path)], None if format_of(str(path)) else "text")
    parts = cut_parts(sources, Columns(text_column, None, ()), WINDOW_TEXTS, Position())
    return [text for part in islice(parts, 1) for text in part.texts]


class _Cursor:
    """Keeps track of the position while rows are read."""

    def __init__(self, sources: Sequence[Source], start: Position, limit: int | None) -> None:
        self.sources, self.start, self.limit = sources, start, limit
        self.source, self.source_rows, self.rows = start.source, 0, start.rows - start.source_rows
        self._hash = hashlib.sha256()
        self._fraction = 0.0

    def advance(self, source: int, block: Block) -> None:
        """Count the rows of `block` as read."""
        if source != self.source:
            self.source, self.source_rows, self._hash = source, 0, hashlib.sha256()
        self._hash.update(b"".join(block.raw))
        end = int(block.ends[-1])
        self.rows += end - self.source_rows
        self.source_rows, self._fraction = end, block.fraction

    def step_over(self, source_rows: int) -> None:
        """Count the rest of a file of `source_rows` rows as read."""
        if source_rows > self.source_rows:
            self.rows += source_rows - self.source_rows
            self.source_rows, self._fraction = source_rows, 1.0

    def position(self) -> Position:
        """The current position."""
        return Position(self.source, self.source_rows, self.rows, self._hash.hexdigest(), self._done())

    def _done(self) -> float:
        sizes = [source.size for source in self.sources]
        if math.isnan(self._fraction) or not sum(sizes):
            return math.nan
        read = (sum(sizes[: self.source]) + sizes[self.source] * self._fraction) / sum(sizes)
        return max(read, self.rows / self.limit) if self.limit else read


def _remaining(sources: Sequence[Source], columns: Columns, cursor: _Cursor) -> Iterator[tuple[int, Block]]:
    """Read the blocks after the cursor's start."""
    for index in range(cursor.start.source, len(sources)):
        skip = cursor.start.source_rows if index == cursor.start.source else 0
        base = cursor.rows
        if cursor.limit is not None and base >= cursor.limit:
            return
        source = sources[index]
        is_parquet = source.format == "parquet"
        blocks = read_parquet(source, columns, base, skip) if is_parquet else read_lines(source, columns, base)
        blocks = _limited(blocks, cursor.limit, base)
        yield from ((index, block) for block in (_skipping(blocks, cursor, index) if skip else blocks))


def _limited(blocks: Iterator[Block], limit: int | None, base: int) -> Iterator[Block]:
    for block in blocks:
        kept = len(block) if limit is None else int(np.searchsorted(block.ends + base, limit, side="right"))
        if kept:
            yield block[:kept]
        if kept < len(block):
            return


def _skipping(blocks: Iterator[Block], cursor: _Cursor, index: int) -> Iterator[Block]:
    """Skip the rows that an earlier run has read, after checking that they are the same."""
    start = cursor.start
    for block in blocks:
        done = int(np.searchsorted(block.ends, start.source_rows, side="right"))
        if done:
            cursor.advance(index, block[:done])
        if done < len(block):
            _check_same(cursor)
            yield block[done:]
            break
    else:
        cursor.step_over(start.source_rows)  # a finished Parquet file is not read again
        _check_same(cursor)
    yield from blocks


def _check_same(cursor: _Cursor) -> None:
    found, start, source = cursor.position(), cursor.start, cursor.sources[cursor.start.source]
    if source.format != "parquet" and (found.source_rows, found.digest) != (start.source_rows, start.digest):
        name = "standard input" if source.path == STDIN else source.path
        raise EmbedError(
            f"{name} is not what it was: its first {start.source_rows:,} rows differ from those already embedded; "
            "give the same input, or begin again with --restart"
        )


def _after_good(block: Block, start: int, count: int) -> int:
    """Index after the `count`-th good row from `start` on; the block's end if there are fewer."""
    good = np.flatnonzero(block.good[start:])
    return start + int(good[count - 1]) + 1 if len(good) >= count else len(block)
