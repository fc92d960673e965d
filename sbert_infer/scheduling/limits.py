"""The limits of a scheduler: how large batches and the queue may be, and how long texts wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sbert_infer.backends.base import Backend
from sbert_infer.types import BULK, INTERACTIVE, Priority

# Of a batch, several texts may have one part in so many to be interactive. Simulated: 16 clients
# with requests of nearly a batch hold up a short query a hundred times longer than as bulk.
_SHARE = 4


@dataclass(frozen=True)
class Limits:
    """The limits of a scheduler."""

    max_batch_tokens: int
    min_batch_tokens: int  # smallest batch to start at once while others run
    workers: int
    max_length: int  # of a text, in tokens
    max_batch_texts: int | None = None
    length_multiple: int = 1  # that lengths are rounded up to, up to `max_length`
    spare_workers: int = 0  # for interactive batches only
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
        return replace(
            limits,
            length_multiple=backend.length_multiple,
            spare_workers=backend.spare_workers,
            packed=backend.packer is not None,
        )

    @property
    def quantum(self) -> int:
        """The tokens that are taken from a request in its turn, or one text if that has more."""
        return self.max_batch_tokens

    @cached_property
    def longest(self) -> int:
        """The most tokens of a batch or of a turn: a text longer than a batch runs alone."""
        return max(self.max_batch_tokens, self.max_length)

    def priority_of(self, tokens: int, texts: int) -> Priority:
        """Return the priority of a call that names none.

        It is interactive if it is one text that fits into a batch, or a few that fit into a part.
        """
        return INTERACTIVE if tokens <= self.quantum // (1 if texts == 1 else _SHARE) else BULK

    def half_round(self, requests: int) -> int:
        """Return the tokens of each half of a round when this many requests wait.

        With small rounds, the next request starts sooner. Large rounds need less padding, but only
        if many requests with a few texts each wait, and then none is served soon anyway.
        """
        return self.workers * self.quantum * min(4, max(1, requests // 32))

    def tokens_before_turn(self, requests: int, most: int | None = None, *, others: int = 0) -> int:
        """Return the most tokens of a lane that start before all of a new request of one turn.

        `requests` is how many of its key wait when it arrives, `most` the most that wait until it
        leaves, `others` how many other keys wait. The rest of a round may go first, then rounds of
        turns before its own, and its own round. A round may exceed its two halves by the last turn
        of one and the last text of the other. For each turn of its key, each other key may have the
        end of one turn and all of the next, which may exceed a quantum by a request.
        """
        turns = requests + 3 * others * (requests + 1)
        rounds = 1 + turns * self.longest // self.half_round(0)
        first = self.half_round(most or requests)
        if others:
            later = self.half_round(0)
        else:
            later, rounds = first, min(rounds, 1 + requests)  # each round has at least one turn
        return 2 * (first + self.longest) + rounds * 2 * (later + self.longest)


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
