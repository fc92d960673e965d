"""Small types that several packages share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

Pair = tuple[str, str]  # two texts that a reranker scores
Text = str | Pair  # one row of a batch

OnTruncate = Literal["warn", "error", "ignore"]  # what to do about a text over the model's limit
Side = Literal["left", "right"]  # the end at which such a text is cut

Priority = Literal["interactive", "bulk"]  # how soon a call must be served beside others
INTERACTIVE: Final = "interactive"
BULK: Final = "bulk"

# A function that is called with the name of a measurement and its value, from several threads.
Observe = Callable[[str, float], object]


class Encoded(NamedTuple):
    """The vectors of one call, with the number of tokens and of truncated texts."""

    # An array [texts, dim], or [dim] for one text; `SparseRows` for a sparse encoder; for token
    # vectors a list of arrays [tokens, hidden].
    vectors: Any
    tokens: int  # of all texts after truncation, including prompts and special tokens
    truncated: int  # number of texts that were cut to the model's limit


class Shape(NamedTuple):
    """A number of rows of tokens, all of one length, in each of which several texts may stand."""

    rows: int
    length: int  # tokens of a row
    segments: int  # the most texts in a row; 1 if the model's texts can't be packed

    @property
    def tokens(self) -> int:
        """Tokens that run, whether or not a text is there."""
        return self.rows * self.length
