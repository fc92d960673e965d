"""Which texts run together: pure functions on token counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Batch", "plan_batches"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Texts that run together, padded to `length` tokens."""

    rows: Indices
    length: int


def plan_batches(lengths: Indices, max_batch_tokens: int, max_batch_texts: int | None = None) -> list[Batch]:
    """Cut texts, sorted by length, into batches of at most `max_batch_tokens` tokens, padding included.

    The longest come first: the short batches at the end then fill whatever worker is free. A text longer than
    the budget runs alone.

    >>> [batch.rows.tolist() for batch in plan_batches(np.array([3, 9, 3, 4]), max_batch_tokens=12)]
    [[1], [3, 0, 2]]
    """
    order = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        length = int(lengths[order[start]])
        count = max(1, max_batch_tokens // length)
        stop = start + min(count, max_batch_texts or count)
        batches.append(Batch(order[start:stop], length))
        start = stop
    return batches
