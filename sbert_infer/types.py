"""The small types that several packages share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

__all__ = ["Encoded", "Observe", "OnTruncate", "Pair", "Side", "Text"]

Pair = tuple[str, str]  # two texts that a reranker scores
Text = str | Pair  # one row of a batch

OnTruncate = Literal["warn", "error", "ignore"]  # what to do about a text over the model's limit
Side = Literal["left", "right"]  # where such a text is cut

# Called with the name of a measurement and its value, from several threads.
Observe = Callable[[str, float], object]


class Encoded(NamedTuple):
    """The vectors of one call, and what they were made of."""

    vectors: Any  # an array [texts, dim], or [dim] for one text; of a sparse encoder, `SparseRows`
    tokens: int  # of all texts, prompts and special ones included, after truncation
    truncated: int  # texts that were cut to the model's limit
