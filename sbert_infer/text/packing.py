"""Packing: pure functions of token counts that decide which texts share a row of a GPU's batch.

A GPU runs a few fixed shapes, each a number of rows of one length. Texts are put into rows one
after another, so that hardly any token runs for nothing. Attention sees its own text only, but is
computed for the whole row, so rows longer than a text cost a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sbert_infer.types import Shape

Indices = npt.NDArray[np.int64]

# The cost of starting a batch, in tokens. Kernels of a small batch leave most of a GPU to the other
# slots' batches, so that it is low. An assumption: not measured on a GPU yet.
_BATCH_COST_TOKENS = 128
_MOST_SEGMENTS = 128


@dataclass(frozen=True)
class PackedRows:
    """Texts that run together in the rows of `shape`. Rows after the last one used are empty."""

    shape: Shape
    texts: Indices  # row by row; the next three are theirs
    rows: Indices
    columns: Indices  # where the text begins in its row
    segments: Indices  # number of the text in its row, from 0

    @property
    def tokens(self) -> int:
        """Tokens that run, whether or not a text is there."""
        return self.shape.tokens


@dataclass(frozen=True)
class Packer:
    """Packs texts into the shapes that a backend can run."""

    shapes: tuple[Shape, ...]
    hidden: int  # width of the model, which attention's share of the work depends on

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest shape."""
        return max(shape.tokens for shape in self.shapes)

    def pack(
        self, lengths: Indices, max_batch_tokens: int | None = None, max_batch_texts: int | None = None
    ) -> list[PackedRows]:
        """Pack texts of these `lengths` by `pack_rows`."""
        return pack_rows(lengths, self.shapes, self.hidden, max_batch_tokens, max_batch_texts)


def pack_rows(
    lengths: Indices,
    shapes: Sequence[Shape],
    hidden: int,
    max_batch_tokens: int | None = None,
    max_batch_texts: int | None = None,
) -> list[PackedRows]:
    """Put texts into rows, and rows into batches of the given shapes, with the least work.

    Each text goes into the row in which it leaves the least space, the longest texts first. Short
    texts fill the gaps that long ones leave. Only if no row has space, a new one is begun: it is
    tried with every shortest length for new rows, and what costs least is taken.

    Args:
        lengths: tokens of each text.
        shapes: the shapes that can run; the longest text must fit into a row.
        hidden: width of the model.
        max_batch_tokens: larger shapes are not used, except for those with the fewest rows.
        max_batch_texts: the most texts in a batch.

    Returns:
        batches with all texts, the largest first.

    >>> shapes = [Shape(rows, 8, segments=4) for rows in (1, 2)]
    >>> for batch in pack_rows(np.array([5, 2, 8, 3, 1]), shapes, hidden=384):
    ...     print(batch.shape.rows, batch.texts, batch.rows, batch.columns)
    2 [2 0 3] [0 1 1] [0 0 5]
    1 [1 4] [0 0] [0 2]

    """
    if not len(lengths):
        return []
    lengths = np.maximum(lengths, 1)  # an empty text has no tokens if there are no special tokens
    limits = _Limits(shapes, max_batch_tokens, max_batch_texts)
    order = np.argsort(-lengths, kind="stable")
    tries = [(rows, limits.cover(rows)) for rows in _all_rows(lengths[order], limits.segments)]
    rows, batches = min(tries, key=lambda found: _cost(found[1], hidden))
    return _assign(rows, batches, order, lengths)


def row_cost(length: int, hidden: int) -> float:
    """Work of a row, in tokens: a layer's products, and attention, which sees the whole row.

    Of a token's work in a layer, 24 hidden^2 are products with weights and 4 length hidden are
    attention's (in a feed-forward layer four times as wide as the model).
    """
    return length * (1 + length / (6 * hidden))


def work(lengths: Indices, row_lengths: Sequence[int], hidden: int) -> float:
    """Work of all texts, in tokens, when packed into rows of these lengths."""
    segments = {length: segments_of(length) for length in row_lengths}
    tries = _all_rows(np.sort(lengths)[::-1], segments)
    return min(sum(row_cost(length, hidden) for length in rows.lengths.tolist()) for rows in tries)


def segments_of(length: int) -> int:
    """The most texts in a row: texts of four tokens, two of which are special, still fill it.

    In a long row, which has shorter ones beside it, more would only cost pooling and copying.
    """
    return max(1, min(length // 4, _MOST_SEGMENTS))


@dataclass(frozen=True)
class _Rows:
    """Rows, and the texts in them: runs of texts, in their order from long to short."""

    lengths: Indices  # of each row
    texts: Indices  # in each row
    run_rows: Indices  # the row of each run
    run_texts: Indices  # texts in each run


def _all_rows(lengths: Indices, segments: dict[int, int]) -> list[_Rows]:
    """Fill rows once for each shortest length of a new row; `lengths` descend.

    `segments` are the most texts in a row, by its length.
    """
    row_lengths = sorted(segments)
    if lengths[0] > row_lengths[-1]:
        raise ValueError(f"a text of {lengths[0]} tokens is longer than the longest row, {row_lengths[-1]}")
    values, counts = np.unique(-lengths, return_counts=True)
    texts = list(zip((-values).tolist(), counts.tolist(), strict=True))
    return [_best_fit(texts, row_lengths[start:], segments) for start in range(len(row_lengths))]


def _best_fit(texts: list[tuple[int, int]], row_lengths: list[int], segments: dict[int, int]) -> _Rows:
    """Fill rows with texts, given as (length, how many), from long to short.

    New rows have the first of `row_lengths` that holds the text. Texts of one length go into the
    tightest row until it is full, so this takes a step for each row and length, not for each text.
    """
    spaces: dict[int, list[int]] = {}  # free tokens -> rows with just so many
    has_space = 0  # bit n: there are rows with n free tokens; finds the tightest in one operation
    begun: list[int] = []  # length of each row
    free: list[int] = []
    held: list[int] = []  # texts in each row
    run_rows, run_texts = [], []
    for length, count in texts:
        while count:
            if tight := has_space >> length:
                space = length + (tight & -tight).bit_length() - 1
                row = spaces[space].pop()
                if not spaces[space]:
                    has_space ^= 1 << space
            else:
                row, space = len(begun), next(row for row in row_lengths if row >= length)
                begun.append(space)
                free.append(space)
                held.append(0)
            taken = min(count, space // length, segments[begun[row]] - held[row])
            count -= taken
            free[row], held[row] = space - taken * length, held[row] + taken
            run_rows.append(row)
            run_texts.append(taken)
            if free[row] and held[row] < segments[begun[row]]:
                spaces.setdefault(free[row], []).append(row)
                has_space |= 1 << free[row]
    shrunk = [
        next(row for row in sorted(segments) if row >= length - space and segments[row] >= texts_held)
        for length, space, texts_held in zip(begun, free, held, strict=True)
    ]
    return _Rows(np.array(shrunk), np.array(held), np.array(run_rows), np.array(run_texts))


class _Limits:
    """The shapes that may run, within the limits of a batch."""

    def __init__(self, shapes: Sequence[Shape], max_batch_tokens: int | None, max_batch_texts: int | None) -> None:
        self._shapes = sorted(shapes)
        self._tokens, self._texts = max_batch_tokens, max_batch_texts
        self.segments = {shape.length: min(shape.segments, max_batch_texts or shape.segments) for shape in shapes}

    def cover(self, rows: _Rows) -> list[Shape]:
        """Return the shapes of batches that hold all rows, those of long rows first."""
        batches = []
        for length in np.unique(rows.lengths)[::-1].tolist():
            fullest = int(rows.texts[rows.lengths == length].max())
            allowed = self._allowed(length, fullest)
            count = int(np.count_nonzero(rows.lengths == length))
            batches += [allowed[size] for size in _cover(count, tuple(allowed), _BATCH_COST_TOKENS / length)]
        return batches

    def _allowed(self, length: int, fullest: int) -> dict[int, Shape]:
        """The shapes of rows of this length that are within the limits, or else the smallest."""
        found = {shape.rows: shape for shape in self._shapes if shape.length == length}
        most = max(found)
        by_tokens = most if self._tokens is None else self._tokens // length
        by_texts = most if self._texts is None else self._texts // fullest
        return {rows: shape for rows, shape in found.items() if rows <= max(min(by_tokens, by_texts), min(found))}


def _cost(batches: Sequence[Shape], hidden: int) -> float:
    """Work of all batches, in tokens."""
    return sum(_BATCH_COST_TOKENS + shape.rows * row_cost(shape.length, hidden) for shape in batches)


def _assign(rows: _Rows, batches: Sequence[Shape], order: Indices, lengths: Indices) -> list[PackedRows]:
    """Assign the rows, by length, to the batches; `order` are the texts from long to short."""
    by_length = np.argsort(-rows.lengths, kind="stable")
    rank = np.empty_like(by_length)
    rank[by_length] = np.arange(len(by_length))
    row_of = np.repeat(rank[rows.run_rows], rows.run_texts)
    by_row = np.argsort(row_of, kind="stable")
    texts, row_of = order[by_row], row_of[by_row]
    first = np.searchsorted(row_of, np.arange(len(rank) + 1))  # of the texts of each row
    before = np.cumsum(lengths[texts]) - lengths[texts]
    columns = before - before[first[row_of]]
    segments = np.arange(len(texts)) - first[row_of]
    found, row = [], 0
    for shape in batches:
        stop = min(row + shape.rows, int(np.count_nonzero(rows.lengths >= shape.length)))
        own = slice(first[row], first[stop])
        found.append(PackedRows(shape, texts[own], row_of[own] - row, columns[own], segments[own]))
        row = stop
    return sorted(found, key=lambda batch: -batch.shape.tokens)


@lru_cache(maxsize=4096)
def _cover(count: int, sizes: tuple[int, ...], batch_cost: float) -> tuple[int, ...]:
    """Sizes of batches, in rows, that hold `count` rows with the fewest rows run, and few batches.

    >>> _cover(75, (1, 4, 16, 32), batch_cost=0.5)
    (32, 32, 4, 4, 1, 1, 1)
    >>> _cover(15, (1, 4, 16, 32), batch_cost=0.5)
    (16,)
    """
    largest = max(sizes)
    rest = count % largest
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # for each number of rows, the cost and the sizes
    for rows in range(1, rest + 1):
        options = ((size, best[max(0, rows - size)]) for size in sizes)
        best.append(min((size + batch_cost + cost, (size, *others)) for size, (cost, others) in options))
    return (*[largest] * (count // largest), *sorted(best[rest][1], reverse=True))
