"""Counters and gauges of an `AsyncEngine`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sbert_infer.errors import TruncationError
from sbert_infer.types import Encoded, Observe, Priority

logger = logging.getLogger("sbert_infer")

# The counters of `AsyncStats` that a `CallCounts` keeps.
TOTALS = ("requests", "texts", "tokens", "truncated", "cache_hits", "cache_misses")


class LaneStats(NamedTuple):
    """What waits of one priority."""

    queued_texts: int  # texts that have not started
    queued_tokens: int
    oldest_age_s: float  # age of the oldest text in the queue


@dataclass(frozen=True)
class AsyncStats:
    """Counters and gauges of an `AsyncEngine`."""

    ready: bool
    lanes: Mapping[Priority, LaneStats]
    queued_texts: int  # texts that have not started, in all lanes
    queued_tokens: int
    oldest_age_s: float  # age of the oldest text in the queue
    running_batches: int
    tokens_per_s: float | None  # measured speed under load
    requests: int  # this and the fields below count since the start
    texts: int
    tokens: int
    truncated: int  # truncated texts
    batches: int
    batch_tokens: int  # tokens that ran; identical texts of one call run once
    padded_tokens: int  # tokens that ran, padding included
    restarts: int  # how often hung or dead workers were replaced
    errors: Mapping[str, int]  # calls that failed, by the name of the exception
    cache_hits: int = 0  # texts whose vectors were in the cache
    cache_misses: int = 0  # texts whose vectors were not


class CallCounts:
    """Counts calls, their results and their errors."""

    def __init__(self, observe: Observe) -> None:
        """Wrap `observe` so that its errors are logged and do not end a worker."""
        self._observe = observe
        self.active = 0
        self.totals: Counter[str] = Counter()  # of `TOTALS`
        self.errors: Counter[str] = Counter()

    def observe(self, name: str, value: float) -> None:
        """Pass on a measurement; log the error if that fails."""
        try:
            self._observe(name, value)
        except Exception:
            logger.exception("observe(%r, %r) failed", name, value)

    def call(self, texts: int, arrival: float) -> _CountedCall:
        """Return a context manager that counts a call with this many texts, and its error."""
        return _CountedCall(self, texts, arrival)

    def done(self, encoded: Encoded) -> None:
        """Count the tokens and truncated texts of a call that succeeded."""
        self.totals["tokens"] += encoded.tokens
        self.totals["truncated"] += encoded.truncated

    def refused(self, error: Exception) -> None:
        """Count a call that was refused before it reached the queue."""
        self.totals["requests"] += 1
        self.errors[type(error).__name__] += 1


class _CountedCall:
    """A context manager as a class, because a generator takes three times as long."""

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
