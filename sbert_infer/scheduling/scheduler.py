"""Which waiting texts run next: a queue of requests as a state machine, without threads and without a clock.

Work leaves in rounds. A round takes texts from the queue, one half of them in turn, a quantum from
each request, and the other half from the oldest requests; it cuts them into batches as `encode`
does, and its batches leave one by one as workers ask. The turns bound what a small request waits
for large ones before it, the age bounds what a large one waits for small ones behind it. A request
may come before its tokens are counted: that is left to the workers, some requests at a time. See
docs/adr/0010.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.backends.base import Backend
from sbert_infer.errors import CallTooLargeError, OverloadedError
from sbert_infer.scheduling.request import Part, Request, Work
from sbert_infer.text.batching import cut_batches

__all__ = ["Limits", "Scheduler"]

Indices = npt.NDArray[np.int64]

# How much a batch that has just run counts in the measured speed.
_NEWEST = 0.1
# The share of the time until a deadline that may be promised. Large requests are overtaken by small
# ones that come later, and speeds vary: in a simulation at five times the load, with 0.8 a tenth of
# the work came too late, with 0.6 none did.
_USABLE = 0.6
# What a worker reads, at most, before it gets its batch: some 3 ms of tokenizing, and of holding
# the lock.
_READ_TOKENS = 2048
# What to tell a client who is refused before any speed was measured.
_RETRY_S = 1.0
# So many requests may be there however long that takes, until their deadlines. They may be all the
# callers that there are, each with one request at a time, and would gain nothing from being sent
# away. More than that is overload, and for some time nobody may wait for long: what is let in then
# is what others wait for when it is over.
_PATIENT = 256
_OVERLOAD_S = 10.0


@dataclass(frozen=True)
class Limits:
    """What a scheduler must keep to."""

    max_batch_tokens: int
    min_batch_tokens: int  # a batch that is worth a worker while others run
    workers: int
    max_length: int  # of a text
    max_batch_texts: int | None = None
    edges: tuple[int, ...] | None = None
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
        """Return limits within those of `backend`, whose best `max_batch_tokens` is the default."""
        if max_batch_tokens is not None and not 1 <= max_batch_tokens <= backend.max_batch_tokens:
            raise ValueError(f"max_batch_tokens must be 1 to {backend.max_batch_tokens}, the engine's own")
        budget, least = max_batch_tokens or backend.max_batch_tokens, backend.min_batch_tokens
        batches = (budget, min(budget, least), backend.workers, max_length, max_batch_texts, backend.edges)
        return cls(*batches, **rest)

    @cached_property
    def quantum(self) -> int:
        """Tokens that a request may take in its turn."""
        return max(self.max_batch_tokens, self.max_length)

    def half_round(self, requests: int) -> int:
        """Tokens that a round takes in turn, and again by age, when so many requests wait.

        Small rounds are for whoever comes next. Large ones pad less, which only shows where many
        requests wait, each of a few texts, and then nobody is served soon anyhow.
        """
        return self.workers * self.quantum * min(4, max(1, requests // 32))

    def tokens_before_turn(self, requests: int, most: int | None = None) -> int:
        """Tokens that start, at most, before the last of a new request of up to a quantum.

        `requests` wait when it comes, and never more than `most` until it leaves. What may go
        first: the rest of a round, rounds full of turns before its own, and its own round. A round
        may exceed its two halves by the last turn of the one and the last text of the other.
        """
        rounds = 2 + requests * self.quantum // self.half_round(0)
        return rounds * 2 * (self.half_round(most or requests) + self.quantum)


class Scheduler:
    """The queue. `now` is any clock in seconds that never goes back.

    Whoever calls holds a lock, except for `add` and `check`: those are for one thread, which should
    never have to wait.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running: set[Work] = set()
        self.reserved_tokens = 0  # of texts that are still being tokenized; of the thread that adds requests
        self._overload_until = -math.inf  # as well
        # Requests that nobody has read yet. What `add` counts only grows, and is written by the
        # thread that adds; what is taken off is counted apart, under the lock.
        self._arrivals: deque[Request] = deque()
        self._added = self._added_tokens = 0
        self._ended = self._read_tokens = 0
        self._done_tokens = self._done_s = 0.0  # of late, under load
        self._mark = 0.0  # when a batch last ended, or the first began
        self.batches = self.batch_tokens = self.padded_tokens = 0
        # Requests with texts that no round has taken: by age, and with the one whose turn it is
        # first.
        self._ages: OrderedDict[Request, None] = OrderedDict()
        self._turns: OrderedDict[Request, None] = OrderedDict()
        self._waiting_texts = self._waiting_tokens = self._planned_tokens = self._running_tokens = 0
        self._round: deque[Work] = deque()

    @property
    def tokens_per_s(self) -> float | None:
        """The speed under load, if there was any."""
        return self._done_tokens / self._done_s if self._done_s > 0 else None

    @property
    def requests(self) -> int:
        """How many have not ended, those that run included."""
        return self._added - self._ended

    @property
    def may_read(self) -> bool:
        """Whether `next_batch` would read requests that nobody has read yet."""
        return bool(self._arrivals) and len(self.running) < self.limits.workers

    @property
    def queued_texts(self) -> int:
        """Texts that have not started."""
        unread = sum(request.texts for request in self._unread())
        return unread + self._waiting_texts + sum(work.texts for work in self._round)

    @property
    def queued_tokens(self) -> int:
        """Tokens that have not started, or a guess where they are still to be counted."""
        unread = self._added_tokens - self._read_tokens
        return self.reserved_tokens + unread + self._waiting_tokens + self._planned_tokens

    def oldest_age(self, now: float) -> float:
        """Seconds that the oldest request with texts in the queue has waited."""
        planned = [request.arrival for work in self._round for request, _ in work.parts if not request.ended]
        unread = [request.arrival for request in self._unread()]
        return now - min([*planned, *unread, *(request.arrival for request in islice(self._ages, 1))], default=now)

    def check(self, tokens: int, deadline: float, now: float) -> None:
        """Raise `OverloadedError` if so many tokens don't fit into the queue, or would not be done in time.

        What it reads are only numbers, which may be off by a round that is being planned. It notes
        an overload.
        """
        most, queued = self.limits.max_queue_tokens, self.queued_tokens
        if tokens > most:
            what = f"the texts have {tokens} tokens, more than max_queue_tokens={most}"
            raise CallTooLargeError(f"{what}: send fewer at once, or raise it", most)
        speed = self.tokens_per_s
        if queued + tokens > most:
            wait = _RETRY_S if speed is None else (queued + tokens - most) / speed
            raise OverloadedError(f"the queue is full: {queued} of {most} tokens, and {tokens} more", wait)
        # Hardly anything ahead: let it try, however slow the last batches were. Speeds may change.
        ahead = self._tokens_ahead(tokens)
        if speed is None or ahead < self.limits.half_round(0):
            return
        wait, patience = ahead / speed, self.limits.max_wait_s
        if wait > patience and self.requests >= _PATIENT:
            self._overload_until = now + _OVERLOAD_S
        if wait > patience and now < self._overload_until:
            raise OverloadedError(f"the queue is too long: {self.requests} requests, {wait:.1f} s", wait - patience)
        need, left = wait + tokens / speed, deadline - now
        if need > _USABLE * left:
            what = f"the queue is too long: {tokens} tokens after {ahead} take {need:.1f} s"
            raise OverloadedError(f"{what}, too close to the deadline in {left:.1f} s", need - _USABLE * left)

    def add(self, request: Request) -> None:
        """Put a request with at least one text into the queue. Its `tokens` may be a guess until somebody reads it."""
        self._added += 1
        self._added_tokens += request.tokens
        request.unread_tokens = request.tokens
        self._arrivals.append(request)

    def drop(self, request: Request) -> None:
        """Start nothing more of a request. What already runs goes on, for nobody."""
        self._ended += not request.ended
        request.ended = True
        self._forget(request)
        if request.unread_tokens:
            self._count_read(request)
            with suppress(ValueError):  # it has just been taken out
                self._arrivals.remove(request)

    def drop_all(self) -> list[Request]:
        """Drop every request that has texts in the queue, and name them."""
        found = [request for request in dict.fromkeys(self._requests()) if not request.ended]
        for request in found:
            self.drop(request)
        return found

    def next_batch(self, now: float) -> Work | None:
        """The batch for a worker that is free, if one should leave now. A request past its deadline is left out."""
        if self.may_read:
            self._read_arrivals(now)
        while len(self.running) < self.limits.workers:
            if not self._round:
                if self._arrivals and self._waiting_tokens < self.limits.min_batch_tokens:
                    self._read_arrivals(now)
                elif self._may_leave(now):
                    self._plan_round(now)
                else:
                    return None
                continue
            work = self._round.popleft()
            self._planned_tokens -= work.tokens
            work.leave_out_dropped(now)
            if work.parts:
                return self._start(work, now)
        return None

    def wake_at(self) -> float:
        """When `next_batch` will have some of what was read for a worker that is free, if nothing happens before."""
        oldest = next(iter(self._ages), None)
        if oldest is None or len(self.running) >= self.limits.workers:
            return math.inf
        return oldest.arrival + self.limits.max_delay_s

    def done(self, work: Work, now: float) -> list[Request]:
        """A batch has run. Gives the requests of which nothing is left to do; none if the batch was abandoned."""
        if not self.abandon(work):
            return []
        # What comes out while a full batch waits, whatever takes the time: that is the speed under
        # load, which is what matters. Small batches of a few callers would make it seem much less,
        # and large requests not worth a try.
        if self.queued_tokens - self.reserved_tokens >= self.limits.max_batch_tokens:
            self._done_tokens = work.tokens + (1 - _NEWEST) * self._done_tokens
            self._done_s = now - self._mark + (1 - _NEWEST) * self._done_s
        self._mark = now
        finished = []
        for request, rows in work.parts:
            request.unfinished -= len(rows)
            if not request.unfinished and not request.ended:
                request.ended = True
                self._ended += 1
                finished.append(request)
        return finished

    def abandon(self, work: Work) -> bool:
        """Count on a batch no longer. False if it had already ended."""
        if work not in self.running:
            return False
        self.running.remove(work)
        self._running_tokens -= work.tokens
        return True

    def _tokens_ahead(self, tokens: int) -> int:
        """Tokens that may run before the last of a new request's, if nothing more comes."""
        queued = self.queued_tokens
        if tokens <= self.limits.quantum:  # it is done in its first turn
            queued = min(queued, self.limits.tokens_before_turn(len(self._turns) + len(self._arrivals)))
        return self._running_tokens + queued

    def _read_arrivals(self, now: float) -> None:
        room = _READ_TOKENS
        while room > 0 and self._arrivals:
            request = self._arrivals.popleft()
            room -= 0 if request.is_counted else request.unread_tokens
            self._count_read(request)
            if not request.ended and request.deadline > now:
                if request.read():
                    self._ages[request] = self._turns[request] = None
                    self._waiting_texts += request.waiting_texts
                    self._waiting_tokens += request.waiting_tokens
                else:
                    self.drop(request)

    def _count_read(self, request: Request) -> None:
        self._read_tokens += request.unread_tokens
        request.unread_tokens = 0

    def _may_leave(self, now: float) -> bool:
        if not self._ages:
            return False
        full = self._waiting_tokens >= self.limits.min_batch_tokens
        return full or not self.running or now >= self.wake_at()

    def _plan_round(self, now: float) -> None:
        parts = list(self._pick(now))
        if not parts:
            return
        owners = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
        rows = np.concatenate([rows for _, rows in parts])
        lengths = np.concatenate([request.lengths[rows] for request, rows in parts])
        prompts = np.array([request.prompt_length for request, _ in parts])[owners]
        budget, most = self._budget(lengths), self.limits.max_batch_texts
        planned: list[tuple[int, Work]] = []
        for prompt in np.unique(prompts):  # the model takes one prompt length for a whole batch
            texts = np.flatnonzero(prompts == prompt)
            for batch in cut_batches(lengths[texts], budget, most, edges=self.limits.edges):
                chosen = np.sort(texts[batch.rows])
                cuts = np.flatnonzero(np.diff(owners[chosen])) + 1
                pieces = [(parts[owners[piece[0]]][0], rows[piece]) for piece in np.split(chosen, cuts)]
                tokens = int(lengths[chosen].sum())
                work = Work(pieces, batch.length, int(prompt), texts=len(chosen), tokens=tokens)
                planned.append((int(chosen[0]), work))
        self._round.extend(work for _, work in sorted(planned, key=lambda ranked: ranked[0]))
        self._planned_tokens += int(lengths.sum())

    def _budget(self, lengths: Indices) -> int:
        """Tokens per batch: the backend's best, but so that a short round has something for every worker.

        Also for those that are not free yet: in a simulation of short texts at 70 % load, that made
        p99 a fifth less.
        """
        share = -(-int(lengths.sum()) // self.limits.workers)
        return min(self.limits.max_batch_tokens, max(share, self.limits.min_batch_tokens))

    def _pick(self, now: float) -> Iterator[Part]:
        """The texts of a round, most urgent first."""
        half = self.limits.half_round(len(self._turns))
        for queue in (self._turns, self._ages):
            room = half
            while queue and room > 0:
                request = next(iter(queue))
                if request.deadline <= now:
                    self._forget(request)
                    continue
                rows = request.take(self.limits.quantum if queue is self._turns else room)
                tokens = int(request.lengths[rows].sum())
                self._waiting_texts -= len(rows)
                self._waiting_tokens -= tokens
                room -= tokens
                if not request.waiting_texts:
                    self._forget(request)
                elif queue is self._turns:
                    queue.move_to_end(request)
                yield request, rows

    def _forget(self, request: Request) -> None:
        if request in self._ages:
            del self._ages[request], self._turns[request]
            self._waiting_texts -= request.waiting_texts
            self._waiting_tokens -= request.waiting_tokens

    def _start(self, work: Work, now: float) -> Work:
        work.alone = not (self.running or self._round or self._ages or self._arrivals)
        if not self.running:
            self._mark = now
        self.running.add(work)
        work.started = work.last_started = now
        self._running_tokens += work.tokens
        self.batches += 1
        self.batch_tokens += work.tokens
        self.padded_tokens += work.texts * work.length
        return work

    def _requests(self) -> Iterator[Request]:
        """Every request that has texts in the queue, some twice."""
        for work in self._round:
            yield from (request for request, _ in work.parts)
        yield from self._ages
        yield from self._unread()

    def _unread(self) -> list[Request]:
        return [request for request in list(self._arrivals) if not request.ended]  # a copy: more may come meanwhile
