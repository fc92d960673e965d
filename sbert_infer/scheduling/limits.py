"""The limits of a scheduler: how large batches and the queue may be, and how long texts wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sbert_infer.backends.base import Backend


@dataclass(frozen=True)
class Limits:
    """The limits of a scheduler."""

    max_batch_tokens: int
    min_batch_tokens: int  # smallest batch to start at once while others run
    workers: int
    max_length: int  # of a text, in tokens
    max_batch_texts: int | None = None
    length_multiple: int = 1  # that lengths are rounded up to, up to `max_length`
    packed: bool = False  # whether the workers pack texts into rows, instead of padding them
    max_queue_tokens: int = 2**20
    max_delay_s: float = 0.002
    max_wait_s: float = 1.0

    @classmethod
    def of(
        cls,
        backend: Backend,
        max_batch_tokens: int | None,
        *,
        max_length: int,
        max_batch_texts: int | None,
        **rest: Any,
    ) -> Limits:
        """Return limits within those of `backend`, whose `max_batch_tokens` is the default."""
        if max_batch_tokens is not None and not 1 <= max_batch_tokens <= backend.max_batch_tokens:
            raise ValueError(f"max_batch_tokens must be 1 to {backend.max_batch_tokens}, the engine's own")
        budget, least = max_batch_tokens or backend.max_batch_tokens, backend.min_batch_tokens
        limits = cls(budget, min(budget, least), backend.workers, max_length, max_batch_texts, **rest)
        return replace(limits, length_multiple=backend.length_multiple, packed=backend.packer is not None)

    @cached_property
    def quantum(self) -> int:
        """The most tokens that are taken from a request in its turn."""
        return max(self.max_batch_tokens, self.max_length)

    def half_round(self, requests: int) -> int:
        """Return the tokens of each half of a round when this many requests wait.

        With small rounds, the next request starts sooner. Large rounds need less padding, but only
        if many requests with a few texts each wait, and then none is served soon anyway.
        """
        return self.workers * self.quantum * min(4, max(1, requests // 32))

    def tokens_before_turn(self, requests: int, most: int | None = None) -> int:
        """Return the most tokens that start before all of a new request, up to a quantum, has.

        `requests` is how many wait when it arrives, `most` the most that wait until it leaves. The
        rest of a round may go first, then rounds of turns before its own, and its own round. A
        round may exceed its two halves by the last turn of one and the last text of the other.
        """
        rounds = 2 + requests * self.quantum // self.half_round(0)
        return rounds * 2 * (self.half_round(most or requests) + self.quantum)


def check_positive(**values: float) -> None:
    """Raise `ValueError` for the first of these arguments that is not more than 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, got {value}")


def check_not_negative(**values: float) -> None:
    """Raise `ValueError` for the first of these arguments that is not at least 0."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
