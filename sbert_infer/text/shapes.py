"""The choice of the shapes that a GPU runs, by the least work for the lengths to be expected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from sbert_infer.text.batching import bucket_edges
from sbert_infer.text.packing import segments_of, work
from sbert_infer.types import Shape

Indices = npt.NDArray[np.int64]

# Lengths are rounded up to a multiple of this: tensor cores take 16-bit operands in blocks of 8.
_LENGTH_MULTIPLE = 8
_SHORTEST_ROW = 32
_LONE_ROW = 64  # one row of at most this length is always there, for a text that comes alone
# Up to three lengths besides the longest, each of which must save a share of the work: every length
# adds some shapes, which take time to build and memory to keep ready. The share is larger if the
# lengths are only assumed.
_MOST_SHORTER = 3
_WORTHWHILE, _WORTHWHILE_IF_ASSUMED = 0.015, 0.03
_QUANTILES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
_SAMPLE = 1000  # texts that are packed to compare lengths
_EDGES = 4  # lengths for texts that can't be packed
_ROWS_FACTOR = 4  # between the numbers of rows of one length
# Texts with fewer tokens than this are rare.
_SHORTEST_TEXT = 8


def choose_shapes(
    lengths: Indices | None, longest: int, hidden: int, max_batch_tokens: int, *, packed: bool = True
) -> tuple[Shape, ...]:
    """Return the shapes to build for texts of `lengths`, each up to `longest` tokens.

    Without `lengths`, texts of 8 to 16 tokens are assumed to be as much work as those of 16 to 32,
    and so on: short texts are many, long ones are few.

    Args:
        lengths: tokens of texts like those to be encoded; longer ones are cut.
        longest: the model's limit.
        hidden: the model's width.
        max_batch_tokens: tokens of the largest shapes; a single row may be longer.
        packed: whether a row may hold several texts.

    >>> shapes = choose_shapes(None, longest=512, hidden=384, max_batch_tokens=4096)
    >>> [(shape.rows, shape.length) for shape in shapes]
    [(1, 64), (1, 128), (4, 128), (16, 128), (32, 128), (1, 512), (4, 512), (8, 512)]

    """
    if max_batch_tokens < 1:
        raise ValueError(f"max_batch_tokens must be at least 1, got {max_batch_tokens}")
    longest = row_length(longest)
    sample = _sample(lengths, longest)
    worthwhile = _WORTHWHILE_IF_ASSUMED if lengths is None else _WORTHWHILE
    if packed:
        chosen = _row_lengths(sample, longest, hidden, worthwhile)
    else:
        chosen = bucket_edges(sample, _EDGES, longest, _LENGTH_MULTIPLE)
    counts = {length: _row_counts(max(1, max_batch_tokens // length)) for length in chosen}
    if packed and min(chosen) > _LONE_ROW:
        counts = {_LONE_ROW: [1], **counts}
    return tuple(
        Shape(rows, length, segments_of(length) if packed else 1) for length in counts for rows in counts[length]
    )


def row_length(tokens: int) -> int:
    """Return the length of the shortest row for a text of so many tokens.

    >>> row_length(61)
    64

    """
    return -(-tokens // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def _sample(lengths: Indices | None, longest: int) -> Indices:
    """Return lengths that stand for all of them."""
    if lengths is None:
        shortest = min(_SHORTEST_TEXT, longest)
        assumed: Indices = (1 / np.linspace(1 / shortest, 1 / longest, _SAMPLE)).round().astype(np.int64)
        return assumed
    ordered: Indices = np.sort(np.clip(lengths, 1, longest))
    chosen: Indices = ordered[np.linspace(0, len(ordered) - 1, min(_SAMPLE, len(ordered))).round().astype(np.int64)]
    return chosen


def _row_lengths(sample: Indices, longest: int, hidden: int, worthwhile: float) -> Sequence[int]:
    """Return `longest` and the shorter lengths that each save a `worthwhile` share, ascending.

    All choices among powers of two and some of the texts' own lengths are tried: rows as long as a
    text are best if most texts are long, or equally long.
    """
    powers = [1 << exponent for exponent in range(_SHORTEST_ROW.bit_length() - 1, (longest - 1).bit_length())]
    own = np.quantile(sample, _QUANTILES, method="higher")
    rounded = (-(-own // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE).tolist()
    candidates = sorted({length for length in [*powers, *rounded] if _SHORTEST_ROW <= length < longest})
    best, least = (longest,), work(sample, [longest], hidden)
    for count in range(1, min(_MOST_SHORTER, len(candidates)) + 1):
        choices = [(*shorter, longest) for shorter in combinations(candidates, count)]
        costs = {choice: work(sample, choice, hidden) for choice in choices}
        cheapest = min(choices, key=costs.__getitem__)
        if costs[cheapest] < (1 - worthwhile) * least:
            best, least = cheapest, costs[cheapest]
    return best


def _row_counts(most: int) -> list[int]:
    """Return 1, 4, 16 and so on up to `most`, which is the last."""
    counts = [1]
    while counts[-1] * _ROWS_FACTOR < most:
        counts.append(counts[-1] * _ROWS_FACTOR)
    return sorted({*counts, most})
