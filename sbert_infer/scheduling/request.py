"""Requests, which wait in the queue, and batches, which hold texts of one or more requests."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from sbert_infer.scheduling.timeline import BatchRun, Timeline
from sbert_infer.types import INTERACTIVE, Priority

Indices = npt.NDArray[np.int64]

_FIRST = np.zeros(1, np.int64)


class Request:
    """The texts of one call. They are taken longest first, so that similar lengths run together."""

    texts: int
    tokens: int  # an estimate until the request is read
    unread_tokens = 0  # that estimate, while the request waits to be read
    is_counted = False  # whether `tokens` is exact
    timeline: Timeline | None = None  # of its caller, if that traces it

    def __init__(
        self,
        lengths: Indices | None,
        *,
        arrival: float,
        deadline: float = math.inf,
        prompt_length: int = 0,
        priority: Priority = INTERACTIVE,
        key: Hashable = None,  # requests of one key share its turns
    ) -> None:
        self.arrival, self.deadline, self.prompt_length = arrival, deadline, prompt_length
        self.priority, self.key = priority, key
        self.ended = False  # finished or dropped: no more of its texts will start
        self._taken = 0
        if lengths is not None:
            self.set_lengths(lengths)

    def set_lengths(self, lengths: Indices) -> None:
        """Set the number of tokens of each text."""
        self.is_counted = True
        self.lengths = np.maximum(lengths, 1)  # some tokenizers return no tokens for an empty text
        self.texts = self.unfinished = len(lengths)  # those without a vector yet
        if len(lengths) == 1:  # as in most requests to a server
            self.tokens = int(self.lengths[0])
            self._order, self._before = _FIRST, np.array([0, self.tokens])
        else:
            self.tokens = int(self.lengths.sum())
            self._order = np.argsort(-self.lengths, kind="stable")
            self._before = np.zeros(len(lengths) + 1, np.int64)  # number of tokens before each text
            np.cumsum(self.lengths[self._order], out=self._before[1:])

    def read(self) -> bool:
        """Count the tokens, unless they are. Return False, and fail the request, if that fails."""
        return True

    @property
    def waiting_texts(self) -> int:
        """The number of texts that no round has taken yet."""
        return len(self._order) - self._taken

    @property
    def waiting_tokens(self) -> int:
        """The number of tokens that no round has taken yet."""
        return self.tokens - int(self._before[self._taken])

    def take(self, tokens: int) -> Indices:
        """Return the next texts: as many as fit into `tokens`, but at least one."""
        start = self._taken
        fit = int(np.searchsorted(self._before, self._before[start] + tokens, side="right")) - 1
        self._taken = max(fit, start + 1)
        return self._order[start : self._taken]


Part = tuple[Request, Indices]  # some texts of a request


class Work:
    """A batch: texts of one or more requests, padded to `length` tokens; packed if that is None."""

    padded_tokens = 0  # tokens that ran, padding included; set when it runs

    def __init__(self, parts: list[Part], length: int | None, prompt_length: int, *, texts: int, tokens: int) -> None:
        self.parts, self.length, self.prompt_length = parts, length, prompt_length
        self.texts, self.tokens = texts, tokens  # totals of `parts`
        # `last_started` is when the last run began, if the batch failed and runs in halves.
        self.started = self.last_started = math.inf
        self.alone = False  # whether no other batch runs or waits

    @property
    def priority(self) -> Priority:
        """The priority of all its texts."""
        return self.parts[0][0].priority

    def leave_out_dropped(self, now: float) -> None:
        """Remove texts of requests that were dropped or are past their deadline."""
        if any(request.ended or request.deadline <= now for request, _ in self.parts):
            self.parts = [part for part in self.parts if not part[0].ended and part[0].deadline > now]
            self.texts = sum(len(rows) for _, rows in self.parts)
            self.tokens = sum(int(request.lengths[rows].sum()) for request, rows in self.parts)

    def note_start(self) -> BatchRun | None:
        """Note in the timelines of its requests that it starts. Return None if there are none."""
        timelines = [request.timeline for request, _ in self.parts if request.timeline is not None]
        if not timelines:
            return None
        run = BatchRun(self.started, self.texts, self.tokens)
        for timeline in timelines:
            timeline.batches.append(run)
        return run
