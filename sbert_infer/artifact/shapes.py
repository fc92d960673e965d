"""The shapes that a TensorRT engine runs: rows of tokens, each of which holds several texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A number of rows of one length. A TensorRT engine has an optimization profile for each."""

    rows: int
    length: int  # tokens of a row
    segments: int  # the most texts in a row; 1 for a model whose texts can't be packed

    @property
    def tokens(self) -> int:
        """Tokens that run, whether a text is there or not."""
        return self.rows * self.length
