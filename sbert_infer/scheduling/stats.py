"""Counters of an `AsyncEngine`: what it has done, and what it is doing now."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sbert_infer.errors import TruncationError
from sbert_infer.types import Encoded, Observe

__all__ = ["AsyncStats", "CallCounts"]

logger = logging.getLogger("sbert_infer")


@dataclass(frozen=True)
class AsyncStats:
    """What an `AsyncEngine` has done, and what it is doing now."""

    ready: bool
    queued_texts: int  # that have not started
    queued_tokens: int
    oldest_age_s: float  # of the texts in the queue
    running_batches: int
    tokens_per_s: float | None  # under load, as measured
    requests: int  # this and all that follow: since the start
    texts: int
    tokens: int
    truncated: int  # texts
    batches: int
    batch_tokens: int  # tokens that ran; identical texts of one call run once
    padded_tokens: int  # the same, padding included
    restarts: int  # how often hung or dead workers were replaced
    errors: Mapping[str, int]  # calls that failed, by the name of the exception


class CallCounts:
    """Counts calls from their first to their last line."""

    def __init__(self, observe: Observe) -> None:
        """Wrap `observe` so that its errors are logged and end no worker."""
        self._observe = observe
        self.active = 0
        self.totals: Counter[str] = Counter()  # requests, texts, tokens, truncated
        self.errors: Counter[str] = Counter()

    def observe(self, name: str, value: float) -> None:
        """Pass a measurement on."""
        try:
            self._observe(name, value)
        except Exception:
            logger.exception("observe(%r, %r) failed", name, value)

    def call(self, texts: int, arrival: float) -> _CountedCall:
        """Return a context that counts a call with this many texts, and its error if it has one."""
        return _CountedCall(self, texts, arrival)

    def done(self, encoded: Encoded) -> None:
        """Count what a call has given."""
        self.totals["tokens"] += encoded.tokens
        self.totals["truncated"] += encoded.truncated

    def refused(self, error: Exception) -> None:
        """Count a call that was refused before it reached the queue."""
        self.totals["requests"] += 1
        self.errors[type(error).__name__] += 1


class _CountedCall:
    """A context. Not a generator: that takes three times as long."""

    __slots__ = ("_arrival", "_counts")

    def __init__(self, counts: CallCounts, texts: int, arrival: float) -> None:
        self._counts, self._arrival = counts, arrival
        counts.totals["requests"] += 1
        counts.totals["texts"] += texts

    def __enter__(self) -> None:
        self._counts.active += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        counts = self._counts
        counts.active -= 1
        counts.observe("total", time.monotonic() - self._arrival)
        if kind is not None:
            counts.errors[kind.__name__] += 1
        if isinstance(error, TruncationError):
            counts.totals["truncated"] += error.texts
