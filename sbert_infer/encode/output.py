"""What is collected of each text: one `Output` for every kind of vector that a model can give."""

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

__all__ = ["Collector", "EncodeStats", "Indices", "Output", "Window", "not_finite"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodeStats:
    """What one call of `encode` did."""

    texts: int = 0
    unique_texts: int = 0  # identical texts run once
    truncated: int = 0  # texts cut to the model's limit
    tokens: int = 0  # of the unique texts, after truncation
    padded_tokens: int = 0  # tokens that ran, padding included
    batches: int = 0

    @property
    def padding(self) -> float:
        """The share of the work that was padding, 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def __add__(self, other: EncodeStats) -> EncodeStats:
        names = self.__dataclass_fields__
        return EncodeStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Window:
    """The vectors of consecutive texts, in order, from text `start` on."""

    start: int
    vectors: Any  # an array [texts, dim], or whatever the output's collector makes
    stats: EncodeStats


class Collector(ABC):
    """Collects what the backend gives for some texts. Batches arrive in any order, from any thread."""

    @abstractmethod
    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        """Keep the outputs of a batch, made of these texts, and return those with NaN or infinity."""

    @abstractmethod
    def result(self, order: Indices | None) -> Any:
        """Everything, for these texts in this order (None: each text once, as they came)."""


class Output(ABC):
    """One kind of output: which outputs of the graph it needs, and what is made of them."""

    names: tuple[str, ...]  # of the graph's outputs
    max_length: int | None = None  # in tokens; None for the tokenizer's own limit
    max_batch_texts: int | None = None

    def fit(self, tokenized: TokenizedTexts) -> TokenizedTexts:
        """Texts as this output needs them: by default, as they are."""
        return tokenized

    @abstractmethod
    def collect(self, tokenized: TokenizedTexts) -> Collector:
        """Return an empty collector for these texts, which `fit` has prepared."""

    @abstractmethod
    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> Any:
        """Turn the windows of one call, of `count` texts, into what `encode` returns."""


def not_finite(rows: Indices, values: Array) -> Indices:
    """Those of `rows` whose values, [rows, ...], are not all finite."""
    finite = np.isfinite(values)
    return rows[:0] if finite.all() else rows[~finite.reshape(len(rows), -1).all(axis=1)]
