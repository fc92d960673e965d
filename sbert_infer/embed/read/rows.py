"""Blocks of rows, the bad ones marked: what every reader yields. The contract of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sbert_infer.errors import EmbedError

ROW = "row"  # column of row numbers, where no other column identifies a row


@dataclass(frozen=True)
class Problem:
    """Why there is no text, for one row or for `rows` rows that can't be read."""

    reason: str
    rows: int = 1
    id: object = None  # the row's id, if known


@dataclass(frozen=True)
class Columns:
    """Which columns to read, and what to call the vectors."""

    text: str = "text"
    # None: a column `row` numbers the rows of the whole input from 0, bad ones included.
    id: str | None = None
    carried: tuple[str, ...] | None = None  # None: all but the text
    embedding: str = "embedding"
    header: bool = True  # False: the columns of CSV and TSV are called 1, 2, 3, ...

    def kept(self, available: Sequence[str]) -> list[str]:
        """The columns to carry to the output, the id first."""
        others = [name for name in available if name != self.text] if self.carried is None else self.carried
        return list(dict.fromkeys([*([] if self.id is None else [self.id]), *others]))

    def check(self, available: Sequence[str], path: str, *, whole: bool = True) -> None:
        """Raise if rows of `path` with the columns `available` can't be embedded as asked.

        Columns may be missing if these rows are not the `whole` file.
        """
        there = ", ".join(available) or "none"
        if not available:  # every row so far is bad
            return
        for name, option in () if not whole else ((self.text, "--text-column"), (self.id, "--id-column")):
            if name is not None and name not in available:
                raise EmbedError(f"{path} has no column {name!r}; name another with {option} (there are: {there})")
        if whole and (missing := [name for name in self.carried or () if name not in available]):
            raise EmbedError(f"{path} has no column {missing[0]!r}; see --columns (there are: {there})")
        kept = self.kept(available)
        if self.embedding in kept:
            raise EmbedError(f"{path} has a column {self.embedding!r}: see --embedding-column, or --columns")
        if self.id is None and ROW in kept:
            raise EmbedError(
                f"{path} has a column {ROW!r}, as the rows' numbers are called: see --id-column, --columns"
            )


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one source, with one entry per row (or `Problem`) in each field."""

    texts: Sequence[str | Problem]
    starts: npt.NDArray[np.int64]  # rows of the source before this one
    ends: npt.NDArray[np.int64]  # rows of the source up to this one, itself included
    carried: pa.Table  # id first; values of bad rows are meaningless
    fraction: float  # fraction of the source read after this block; NaN if unknown
    lines: Sequence[int] = ()  # files of lines: the line where each row begins, from 1
    raw: Sequence[bytes] = ()  # files of lines: the bytes of each row

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def good(self) -> npt.NDArray[np.bool_]:
        """Which rows have a text."""
        return np.fromiter((isinstance(text, str) for text in self.texts), np.bool_, len(self.texts))

    def __getitem__(self, part: slice) -> Block:
        start, stop, _ = part.indices(len(self))
        return Block(
            self.texts[part],
            self.starts[part],
            self.ends[part],
            self.carried.slice(start, stop - start),
            self.fraction,
            self.lines[part],
            self.raw[part],
        )


def text_problem(value: object, column: str) -> str | None:
    """Why `value` is not a text; None if it is one."""
    if value is None:
        return f"{column} is null"
    if not isinstance(value, str):
        return f"{column} is not text but {type(value).__name__}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{column} holds a lone surrogate"
    return None
