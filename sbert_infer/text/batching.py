"""Batching: pure functions of token counts that decide which texts run together, and how padded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

# The cost of starting a batch, in tokens: a batch of 128 tokens has 8 % less throughput per token
# than one of 512 (measured on MiniLM, 2 cores, FP32 and int8 alike).
BATCH_COST_TOKENS = 16


@dataclass(frozen=True)
class PaddedRows:
    """Texts that run together, each in a row of its own, padded to `length` tokens."""

    texts: Indices
    length: int

    @property
    def tokens(self) -> int:
        """Tokens that run, padding included."""
        return len(self.texts) * self.length


def cut_batches(
    lengths: Indices,
    max_batch_tokens: int,
    max_batch_texts: int | None = None,
    multiple: int = 1,
    longest: int | None = None,
) -> list[PaddedRows]:
    """Sort texts by length and cut them into batches of at most `max_batch_tokens`, padded.

    The cuts minimize the cost: the number of tokens that run, padding included, plus a little for
    each batch. A batch is padded to its longest text or, up to `longest`, to the next multiple of
    `multiple`. The longest texts come first, so that short batches at the end keep every worker
    busy. A text longer than the budget runs alone.

    >>> batches = cut_batches(np.array([35, 90, 36, 40]), max_batch_tokens=120)
    >>> [batch.texts.tolist() for batch in batches]
    [[1], [3, 2, 0]]
    """
    order = np.argsort(-lengths, kind="stable")
    padded = np.maximum(
        _rounded_up(lengths[order], multiple, longest), 1
    )  # an empty text has no tokens if there are no special tokens
    counts = _batch_sizes(padded, max_batch_tokens, max_batch_texts or len(order))
    batches = []
    start = 0
    while start < len(order):
        stop = start + int(counts[start])
        batches.append(PaddedRows(order[start:stop], int(padded[start])))
        start = stop
    return batches


def _rounded_up(lengths: Indices, multiple: int, longest: int | None) -> Indices:
    rounded = -(-lengths // multiple) * multiple
    return rounded if longest is None else np.maximum(np.minimum(rounded, longest), lengths)


def _batch_sizes(padded: Indices, max_batch_tokens: int, max_batch_texts: int) -> Indices:
    """Return, for each text, the size of the cheapest batch that starts at it.

    This is dynamic programming, from the last text back to the first.
    """
    texts = len(padded)
    sizes = np.ones(texts, np.int64)
    cost = np.zeros(texts + 1, np.int64)  # of running all texts from this one on
    ramp = np.arange(1, texts + 1)
    for start in range(texts - 1, -1, -1):
        most = min(texts - start, max(1, max_batch_tokens // int(padded[start])), max_batch_texts)
        options = padded[start] * ramp[:most] + cost[start + 1 : start + 1 + most]
        sizes[start] = most - options[::-1].argmin()  # the largest of the cheapest sizes
        cost[start] = options[sizes[start] - 1] + BATCH_COST_TOKENS
    return sizes


def cut_in_order(lengths: Indices, max_batch_tokens: int, max_batch_texts: int | None = None) -> list[Indices]:
    """Cut texts, in their order, into groups of at most `max_batch_tokens`, or of one text.

    >>> [group.tolist() for group in cut_in_order(np.array([30, 50, 40, 90, 10]), 100)]
    [[0, 1], [2], [3, 4]]
    """
    before = np.concatenate([[0], np.cumsum(lengths)])
    groups, start = [], 0
    while start < len(lengths):
        stop = int(np.searchsorted(before, before[start] + max_batch_tokens, side="right")) - 1
        stop = min(max(stop, start + 1), start + (max_batch_texts or len(lengths)))
        groups.append(np.arange(start, stop))
        start = stop
    return groups


def bucket_edges(lengths: Indices, count: int, longest: int, multiple: int = 1) -> list[int]:
    """Return at most `count` bucket edges that pad texts of these `lengths` least in total.

    Edges are multiples of `multiple`, except for the last, which is `longest`. This is dynamic
    programming over the histogram: the least cost of all texts up to an edge, for a given number
    of edges, follows from the least costs of the edges before it.

    >>> bucket_edges(np.array([5, 5, 5, 90, 91, 92]), count=2, longest=128)
    [5, 128]
    >>> bucket_edges(np.array([5, 5, 5, 90, 91, 92]), count=3, longest=128)
    [5, 92, 128]
    """
    if count < 1 or longest < 1 or (len(lengths) and not 0 < lengths.min() <= lengths.max() <= longest):
        raise ValueError(f"need count >= 1 and lengths between 1 and {longest}, got count={count}")
    candidates = np.unique(np.append(np.minimum(-(-lengths // multiple) * multiple, longest), longest))
    texts = np.searchsorted(np.sort(lengths), candidates, side="right")  # texts that fit each candidate
    # cost[i]: the tokens that run for all texts up to candidate i, with one edge more in each round
    cost = texts * candidates
    choices = []
    for _ in range(min(count, len(candidates)) - 1):
        # steps[from, to]: the texts between two edges run at the length of the second one
        steps = cost[:, None] + (texts[None, :] - texts[:, None]) * candidates[None, :]
        steps = np.where(np.tri(len(candidates), k=-1).T > 0, steps, np.iinfo(np.int64).max)
        best = steps.argmin(axis=0)
        improves = steps[best, np.arange(len(candidates))] < cost
        choices.append(np.where(improves, best, -1))
        cost = np.where(improves, steps[best, np.arange(len(candidates))], cost)
    return _follow(candidates, choices)


def _follow(candidates: Indices, choices: list[Indices]) -> list[int]:
    """Return the edges by walking back through the choices; -1 means no edge in that round."""
    at = len(candidates) - 1
    edges = [int(candidates[at])]
    for choice in reversed(choices):
        if choice[at] >= 0:
            at = int(choice[at])
            edges.append(int(candidates[at]))
    return edges[::-1]
