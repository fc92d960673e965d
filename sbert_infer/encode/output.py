"""Interfaces of the kinds of output: an `Output` for each kind of vector that a model can give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.backends.base import Array
from sbert_infer.encode.options import EncodeOptions
from sbert_infer.text.tokenizer import TokenizedTexts

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodeStats:
    """Statistics of one call of `encode`."""

    texts: int = 0
    unique_texts: int = 0  # identical texts run only once
    truncated: int = 0  # texts cut to the model's limit
    tokens: int = 0  # of the unique texts, after truncation
    padded_tokens: int = 0  # tokens that ran, padding included
    batches: int = 0

    @property
    def padding(self) -> float:
        """The share of padding among the tokens that ran, 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def __add__(self, other: EncodeStats) -> EncodeStats:
        names = self.__dataclass_fields__
        return EncodeStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Window:
    """The vectors of consecutive texts, in order, from text `start` on."""

    start: int
    vectors: Any  # an array [texts, dim], or another result of the output's collector
    stats: EncodeStats


class Collector(ABC):
    """Collects the backend's outputs for some texts. Batches come in any order, from any thread."""

    @abstractmethod
    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        """Store the outputs of a batch of these texts; return the rows with NaN or infinity."""

    @abstractmethod
    def result(self, order: Indices | None) -> Any:
        """Return the output of the rows in `order`; None means every row once, as they came."""


class Output(ABC):
    """One kind of output: which of the graph's outputs it needs, and what it makes of them."""

    names: tuple[str, ...]  # names of the graph's outputs that it needs
    max_length: int | None = None  # in tokens; None for the tokenizer's own limit
    max_batch_texts: int | None = None

    def fit(self, tokenized: TokenizedTexts) -> TokenizedTexts:
        """Return the texts as this output needs them; by default unchanged."""
        return tokenized

    def check(self, tokenized: TokenizedTexts, order: Indices | None) -> None:  # noqa: B027 - optional
        """Raise if the results of these texts, in this order, would be too much for one call."""

    @abstractmethod
    def collect(self, tokenized: TokenizedTexts) -> Collector:
        """Return an empty collector for these texts, which `fit` has returned."""

    @abstractmethod
    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> Any:
        """Turn the windows of a call with `count` texts into the result of `encode`."""


def not_finite(rows: Indices, values: Array) -> Indices:
    """Return those of `rows` whose values, [rows, ...], are not all finite."""
    finite = np.isfinite(values)
    return rows[:0] if finite.all() else rows[~finite.reshape(len(rows), -1).all(axis=1)]
