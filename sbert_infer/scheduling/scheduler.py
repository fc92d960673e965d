"""The scheduler: queues of requests that decide which texts run next, without threads or a clock.

Requests wait in two lanes, interactive and bulk. Interactive batches go first, also on workers
beyond those that bulk batches may use, but bulk is owed a share of the tokens while it waits. A
request may be added before its tokens are counted; workers then count them, a few requests at a
time. See docs/adr/0010 and 0022.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from sbert_infer.errors import CallTooLargeError, OverloadedError
from sbert_infer.scheduling.lane import Lane
from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.request import Request, Work
from sbert_infer.types import BULK, INTERACTIVE, Priority

# Interactive tokens for each bulk token, while both wait: three quarters of the speed.
_PER_BULK_TOKEN = 3
# The weight of the newest batch in the measured speed.
_NEWEST = 0.1
# A request is accepted if it should be done within this share of its time. Later, smaller requests
# overtake large ones, and speeds vary: in a simulation at five times the load, a tenth of the work
# was late with 0.8, and none with 0.6.
_USABLE = 0.6
# When a refused client should retry, if no speed was measured yet.
_RETRY_S = 1.0
# Up to this many requests may wait until their deadlines. They may be all the callers there are,
# each with one request at a time, and refusing them would gain nothing. More requests are an
# overload: for some time, none may wait long, because requests accepted during an overload delay
# those that come after it.
_PATIENT = 256
_OVERLOAD_S = 10.0


class Scheduler:
    """Two queues of requests. `now` is any monotonic clock, in seconds.

    The caller must hold the lock, except for `add` and `check`: only one thread, which must never
    block, may call those.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running: set[Work] = set()
        self.lanes: dict[Priority, Lane] = {INTERACTIVE: Lane(limits), BULK: Lane(limits)}
        # Tokens that bulk must start before more interactive ones: once it is a full batch, that
        # goes first. Less than 0 after a text that is longer than that.
        self._owed = 0.0
        self._done_tokens = self._done_s = 0.0  # recent tokens and seconds under load
        self._mark = 0.0  # when a batch last ended, or the first one started
        self._running_tokens = 0
        self.batches = self.batch_tokens = self.padded_tokens = 0

    @property
    def tokens_per_s(self) -> float | None:
        """The measured speed under load; None if there was no load."""
        return self._done_tokens / self._done_s if self._done_s > 0 else None

    @property
    def requests(self) -> int:
        """The number of requests that have not ended, including those that run."""
        return sum(lane.requests for lane in self.lanes.values())

    @property
    def may_read(self) -> bool:
        """Whether `next_batch` would read new requests."""
        return any(self.lanes[priority].has_arrivals for priority in self._startable())

    @property
    def queued_texts(self) -> int:
        """The number of texts that have not started."""
        return sum(lane.queued_texts for lane in self.lanes.values())

    @property
    def queued_tokens(self) -> int:
        """The number of tokens that have not started, estimated if not counted yet."""
        return sum(lane.queued_tokens for lane in self.lanes.values())

    def oldest_age(self, now: float) -> float:
        """Return how long the oldest request with texts in the queue has waited, in seconds."""
        return max(lane.oldest_age(now) for lane in self.lanes.values())

    def check(
        self, tokens: int, deadline: float, now: float, priority: Priority = INTERACTIVE, key: Hashable = None
    ) -> None:
        """Raise if this many tokens do not fit into their lane, or would not be done in time.

        Called without the lock, this reads counters that may be off by a round that is just being
        made. It also notes when an overload begins. A key with less than its share of the lane is
        not refused because of what others have queued, but for its deadline.
        """
        most = self.limits.max_queue_tokens
        if tokens > most:
            what = f"the texts have {tokens} tokens, more than max_queue_tokens={most}"
            raise CallTooLargeError(f"{what}: send fewer at once, or raise it", most)
        lane, speed = self.lanes[priority], self.tokens_per_s
        queued, has_share = lane.queued_tokens, lane.has_share(key, tokens)
        if queued + tokens > most and not has_share:
            wait = _RETRY_S if speed is None else (queued + tokens - most) / speed
            raise OverloadedError(f"the queue is full: {queued} of {most} tokens, and {tokens} more", wait)
        # With little work ahead, accept it however slow the last batches were: speeds may change.
        ahead = self._tokens_ahead(tokens, priority, key)
        if speed is None or ahead < self.limits.half_round(0):
            return
        wait, patience = ahead / speed, self.limits.max_wait_s
        if wait > patience and lane.requests >= _PATIENT:
            lane.overload_until = now + _OVERLOAD_S
        if wait > patience and now < lane.overload_until and not has_share:
            raise OverloadedError(f"the queue is too long: {lane.requests} requests, {wait:.1f} s", wait - patience)
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
        self.lanes[request.priority].add(request)

    def drop(self, request: Request) -> None:
        """Start no more texts of a request. Texts that already run are finished and ignored."""
        self.lanes[request.priority].drop(request)

    def drop_all(self) -> list[Request]:
        """Drop every request that has texts in the queue, and return those requests."""
        queued = [request for lane in self.lanes.values() for request in lane.queued()]
        found = [request for request in dict.fromkeys(queued) if not request.ended]
        for request in found:
            self.drop(request)
        return found

    def next_batch(self, now: float) -> Work | None:
        """Return a batch for a free worker, if one should start now.

        Requests past their deadlines are left out.
        """
        startable = self._startable()
        for priority in startable:
            self.lanes[priority].read_arrivals(now)
        for priority in startable:
            lane = self.lanes[priority]
            # Waiting for more texts would only let the other lane's go first.
            other_waits = any(other.waits for other in self.lanes.values() if other is not lane)
            if (work := lane.next_batch(now, at_once=not lane.running or other_waits)) is not None:
                return self._start(work, lane, now)
        return None

    def wake_at(self) -> float:
        """Return when `next_batch` will have a batch for a free worker, if nothing else happens.

        Requests that are not read yet do not count.
        """
        return min((self.lanes[priority].wake_at() for priority in self._startable()), default=math.inf)

    def done(self, work: Work, now: float) -> list[Request]:
        """Note that a batch has run, and return the requests that are now complete.

        There are none if the batch was abandoned.
        """
        if not self.abandon(work):
            return []
        self.batch_tokens += work.tokens  # together with the padding, which is their difference
        self.padded_tokens += work.padded_tokens
        # The speed that matters is the one under load: the tokens that are finished while at least
        # a full batch waits, whatever takes the time. Small batches of a few callers would make it
        # seem much lower, and large requests would be refused.
        reserved = sum(lane.reserved_tokens for lane in self.lanes.values())
        if self.queued_tokens - reserved >= self.limits.max_batch_tokens:
            self._done_tokens = work.tokens + (1 - _NEWEST) * self._done_tokens
            self._done_s = now - self._mark + (1 - _NEWEST) * self._done_s
        self._mark = now
        finished = []
        for request, rows in work.parts:
            request.unfinished -= len(rows)
            if not request.unfinished and not request.ended:
                request.ended = True
                self.lanes[request.priority].ended += 1
                finished.append(request)
        return finished

    def abandon(self, work: Work) -> bool:
        """Remove a batch from those that run. Return False if it had already ended."""
        if work not in self.running:
            return False
        self.running.remove(work)
        self.lanes[work.priority].running -= 1
        self._running_tokens -= work.tokens
        return True

    def _startable(self) -> tuple[Priority, ...]:
        """Return the lanes whose batches may start now, the one that goes first first."""
        owes = self._owed >= self.limits.quantum and self.lanes[BULK].waits
        if len(self.running) < self.limits.workers:
            return (BULK, INTERACTIVE) if owes else (INTERACTIVE, BULK)
        # Only beside bulk: interactive batches that wait for each other fill up instead.
        has_spare = len(self.running) < self.limits.workers + self.limits.spare_workers
        return (INTERACTIVE,) if has_spare and self.lanes[BULK].running and not owes else ()

    def _tokens_ahead(self, tokens: int, priority: Priority, key: Hashable) -> int:
        """Return how many tokens may run before a new request is done, if no more requests come."""
        lane = self.lanes[priority]
        queued = lane.queued_tokens
        if tokens <= self.limits.quantum:  # done in its first turn
            queued = min(queued, lane.tokens_before_turn(key))
        if priority == INTERACTIVE:
            others = min(self.lanes[BULK].queued_tokens, queued // _PER_BULK_TOKEN)
        else:
            others = min(self.lanes[INTERACTIVE].queued_tokens, (queued + tokens) * _PER_BULK_TOKEN)
        return self._running_tokens + queued + others

    def _start(self, work: Work, lane: Lane, now: float) -> Work:
        work.alone = not self.running and not any(each.waits for each in self.lanes.values())
        if not self.running:
            self._mark = now
        self.running.add(work)
        lane.running += 1
        self._count_owed(work)
        work.started = work.last_started = now
        self._running_tokens += work.tokens
        self.batches += 1
        return work

    def _count_owed(self, work: Work) -> None:
        """Count what bulk is owed: no more while it does not wait."""
        if work.priority == INTERACTIVE:
            owed = self._owed + work.tokens / _PER_BULK_TOKEN
            self._owed = owed if self.lanes[BULK].waits else min(0.0, owed)
        elif self._owed >= self.limits.quantum:
            self._owed -= work.tokens
        elif self._owed > 0:  # it ran where no interactive batch waited: that costs nothing more
            self._owed = max(0.0, self._owed - work.tokens)
