"""The scheduler: a queue of requests that decides which texts run next, without threads or a clock.

Texts leave the queue in rounds. A round takes half of its texts from the requests in turn, a
quantum from each, and half from the oldest requests. It cuts them into batches as `encode` does,
and workers take the batches one by one. Taking turns bounds how long a small request waits for
large ones before it; taking the oldest bounds how long a large request waits for small ones after
it. A request may be added before its tokens are counted; workers then count them, a few requests at
a time. See docs/adr/0010.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import numpy as np
import numpy.typing as npt

from sbert_infer.errors import CallTooLargeError, OverloadedError
from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.request import Part, Request, Work
from sbert_infer.text.batching import cut_batches, cut_in_order

Indices = npt.NDArray[np.int64]

# The weight of the newest batch in the measured speed.
_NEWEST = 0.1
# A request is accepted if it should be done within this share of its time. Later, smaller requests
# overtake large ones, and speeds vary: in a simulation at five times the load, a tenth of the work
# was late with 0.8, and none with 0.6.
_USABLE = 0.6
# The most tokens that a worker reads before it gets its batch: about 3 ms of tokenizing, during
# which it holds the lock.
_READ_TOKENS = 2048
# The share of packed rows that texts fill, at least of many: 64 texts of mixed lengths fill 97 %.
_FILL = 0.95
# When a refused client should retry, if no speed was measured yet.
_RETRY_S = 1.0
# Up to this many requests may wait until their deadlines. They may be all the callers there are,
# each with one request at a time, and refusing them would gain nothing. More requests are an
# overload: for some time, none may wait long, because requests accepted during an overload delay
# those that come after it.
_PATIENT = 256
_OVERLOAD_S = 10.0


class Scheduler:
    """A queue of requests. `now` is any monotonic clock, in seconds.

    The caller must hold the lock, except for `add` and `check`: only one thread, which must never
    block, may call those.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running: set[Work] = set()
        # These two are written only by the thread that adds requests.
        self.reserved_tokens = 0  # tokens of texts that are still being tokenized
        self._overload_until = -math.inf
        # Requests that are not read yet. The counters in `add` only grow, and are written only by
        # the thread that adds requests. Requests that leave are counted separately, under the lock.
        self._arrivals: deque[Request] = deque()
        self._added = self._added_tokens = 0
        self._ended = self._read_tokens = 0
        self._done_tokens = self._done_s = 0.0  # recent tokens and seconds under load
        self._mark = 0.0  # when a batch last ended, or the first one started
        self.batches = self.batch_tokens = self.padded_tokens = 0
        # Requests with texts that no round has taken: the oldest first, and the one whose turn is
        # next first.
        self._ages: OrderedDict[Request, None] = OrderedDict()
        self._turns: OrderedDict[Request, None] = OrderedDict()
        self._waiting_texts = self._waiting_tokens = self._round_tokens = self._running_tokens = 0
        self._round: deque[Work] = deque()

    @property
    def tokens_per_s(self) -> float | None:
        """The measured speed under load; None if there was no load."""
        return self._done_tokens / self._done_s if self._done_s > 0 else None

    @property
    def requests(self) -> int:
        """The number of requests that have not ended, including those that run."""
        return self._added - self._ended

    @property
    def may_read(self) -> bool:
        """Whether `next_batch` would read new requests."""
        return bool(self._arrivals) and len(self.running) < self.limits.workers

    @property
    def queued_texts(self) -> int:
        """The number of texts that have not started."""
        unread = sum(request.texts for request in self._unread())
        return unread + self._waiting_texts + sum(work.texts for work in self._round)

    @property
    def queued_tokens(self) -> int:
        """The number of tokens that have not started, estimated if not counted yet."""
        unread = self._added_tokens - self._read_tokens
        return self.reserved_tokens + unread + self._waiting_tokens + self._round_tokens

    def oldest_age(self, now: float) -> float:
        """Return how long the oldest request with texts in the queue has waited, in seconds."""
        ready = [request.arrival for work in self._round for request, _ in work.parts if not request.ended]
        unread = [request.arrival for request in self._unread()]
        return now - min([*ready, *unread, *(request.arrival for request in islice(self._ages, 1))], default=now)

    def check(self, tokens: int, deadline: float, now: float) -> None:
        """Raise if this many tokens do not fit into the queue, or would not be done in time.

        Called without the lock, this reads counters that may be off by a round that is just being
        made. It also notes when an overload begins.
        """
        most, queued = self.limits.max_queue_tokens, self.queued_tokens
        if tokens > most:
            what = f"the texts have {tokens} tokens, more than max_queue_tokens={most}"
            raise CallTooLargeError(f"{what}: send fewer at once, or raise it", most)
        speed = self.tokens_per_s
        if queued + tokens > most:
            wait = _RETRY_S if speed is None else (queued + tokens - most) / speed
            raise OverloadedError(f"the queue is full: {queued} of {most} tokens, and {tokens} more", wait)
        # With little work ahead, accept it however slow the last batches were: speeds may change.
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
            self.check_possible(tokens, left)
            what = f"the queue is too long: {tokens} tokens after {ahead} take {need:.1f} s"
            raise OverloadedError(f"{what}, too close to the deadline in {left:.1f} s", need - _USABLE * left)

    def check_possible(self, tokens: int, seconds: float) -> None:
        """Raise if this many tokens take longer than so many seconds even if nothing else runs."""
        if (speed := self.tokens_per_s) is not None and tokens > speed * seconds:
            fit = int(_USABLE * speed * seconds)
            what = f"{tokens} tokens take longer than {seconds:.1f} s, the time there is"
            raise CallTooLargeError(f"{what}: send at most {fit} at once, or raise the timeout", fit)

    def add(self, request: Request) -> None:
        """Add a request with at least one text. Its `tokens` may be estimated until it is read."""
        self._added += 1
        self._added_tokens += request.tokens
        request.unread_tokens = request.tokens
        self._arrivals.append(request)

    def drop(self, request: Request) -> None:
        """Start no more texts of a request. Texts that already run are finished and ignored."""
        self._ended += not request.ended
        request.ended = True
        self._forget(request)
        if request.unread_tokens:
            self._count_read(request)
            with suppress(ValueError):  # it has just been removed
                self._arrivals.remove(request)

    def drop_all(self) -> list[Request]:
        """Drop every request that has texts in the queue, and return those requests."""
        found = [request for request in dict.fromkeys(self._requests()) if not request.ended]
        for request in found:
            self.drop(request)
        return found

    def next_batch(self, now: float) -> Work | None:
        """Return a batch for a free worker, if one should start now.

        Requests past their deadlines are left out.
        """
        if self.may_read:
            self._read_arrivals(now)
        while len(self.running) < self.limits.workers:
            if not self._round:
                if self._arrivals and self._waiting_tokens < self.limits.min_batch_tokens:
                    self._read_arrivals(now)
                elif self._may_leave(now):
                    self._cut_round(now)
                else:
                    return None
                continue
            work = self._round.popleft()
            self._round_tokens -= work.tokens
            work.leave_out_dropped(now)
            if work.parts:
                return self._start(work, now)
        return None

    def wake_at(self) -> float:
        """Return when `next_batch` will have a batch for a free worker, if nothing else happens.

        Requests that are not read yet do not count.
        """
        oldest = next(iter(self._ages), None)
        if oldest is None or len(self.running) >= self.limits.workers:
            return math.inf
        return oldest.arrival + self.limits.max_delay_s

    def done(self, work: Work, now: float) -> list[Request]:
        """Note that a batch has run, and return the requests that are now complete.

        There are none if the batch was abandoned.
        """
        if not self.abandon(work):
            return []
        self.padded_tokens += work.padded_tokens
        # The speed that matters is the one under load: the tokens that are finished while at least
        # a full batch waits, whatever takes the time. Small batches of a few callers would make it
        # seem much lower, and large requests would be refused.
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
        """Remove a batch from those that run. Return False if it had already ended."""
        if work not in self.running:
            return False
        self.running.remove(work)
        self._running_tokens -= work.tokens
        return True

    def _tokens_ahead(self, tokens: int) -> int:
        """Return how many tokens may run before a new request is done, if no more requests come."""
        queued = self.queued_tokens
        if tokens <= self.limits.quantum:  # done in its first turn
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

    def _cut_round(self, now: float) -> None:
        parts = list(self._pick(now))
        if not parts:
            return
        owners = np.repeat(np.arange(len(parts)), [len(rows) for _, rows in parts])
        rows = np.concatenate([rows for _, rows in parts])
        lengths = np.concatenate([request.lengths[rows] for request, rows in parts])
        prompts = np.array([request.prompt_length for request, _ in parts])[owners]
        ready: list[tuple[int, Work]] = []
        for prompt in np.unique(prompts):  # the model takes one prompt length for a whole batch
            texts = np.flatnonzero(prompts == prompt)
            for group, length in self._cut(lengths[texts]):
                chosen = np.sort(texts[group])
                cuts = np.flatnonzero(np.diff(owners[chosen])) + 1
                pieces = [(parts[owners[piece[0]]][0], rows[piece]) for piece in np.split(chosen, cuts)]
                tokens = int(lengths[chosen].sum())
                work = Work(pieces, length, int(prompt), texts=len(chosen), tokens=tokens)
                ready.append((int(chosen[0]), work))
        self._round.extend(work for _, work in sorted(ready, key=lambda ranked: ranked[0]))
        self._round_tokens += int(lengths.sum())

    def _cut(self, lengths: Indices) -> Iterator[tuple[Indices, int | None]]:
        """Yield the texts of each batch, and the length that they are padded to; None if packed.

        Any texts fill rows well, so those that are packed stay in their order, most urgent first.
        """
        budget, most = self._budget(lengths), self.limits.max_batch_texts
        rounding = (self.limits.length_multiple, self.limits.max_length)
        if self.limits.packed:
            yield from ((group, None) for group in cut_in_order(lengths, int(_FILL * budget), most))
        else:
            yield from ((batch.texts, batch.length) for batch in cut_batches(lengths, budget, most, *rounding))

    def _budget(self, lengths: Indices) -> int:
        """Return the tokens per batch: the backend's best, or less to give every worker a share.

        Workers that are still busy get a share, too: in a simulation of short texts at 70 % load,
        that reduced p99 by a fifth.
        """
        share = -(-int(lengths.sum()) // self.limits.workers)
        return min(self.limits.max_batch_tokens, max(share, self.limits.min_batch_tokens))

    def _pick(self, now: float) -> Iterator[Part]:
        """Take the texts of a round from the queue, most urgent first."""
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
        return work

    def _requests(self) -> Iterator[Request]:
        """Yield every request that has texts in the queue, some of them twice."""
        for work in self._round:
            yield from (request for request, _ in work.parts)
        yield from self._ages
        yield from self._unread()

    def _unread(self) -> list[Request]:
        return [request for request in list(self._arrivals) if not request.ended]  # a copy: others may add more
