"""A lane: requests of one priority that wait, and the order in which their texts leave.

Texts leave in rounds. A round takes half of its texts from the keys in turn, a quantum from each,
and half from the oldest requests. It cuts them into batches as `encode` does. Taking turns bounds
how long a small request waits for large ones before it, and for those of other keys; taking the
oldest bounds how long a large request waits for small ones after it. See docs/adr/0010 and 0022.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.request import Part, Request, Work
from sbert_infer.text.batching import cut_batches, cut_in_order

Indices = npt.NDArray[np.int64]

# The most tokens that a worker reads before it gets its batch: about 3 ms of tokenizing, during
# which it holds the lock.
_READ_TOKENS = 2048
# The share of packed rows that texts fill, at least of many: 64 texts of mixed lengths fill 97 %.
_FILL = 0.95


@dataclass
class Held:
    """What the calls of one key that have not ended hold of a lane."""

    requests: int = 0
    tokens: int = 0


class Lane:
    """The queue of one priority.

    The caller must hold the lock, except for `add`, `hold`, `release` and the properties that they
    change: only one thread, which must never block, may use those.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = 0  # batches
        # Written only by the thread that adds requests.
        self.held: dict[Hashable, Held] = {}  # by key
        self._held_tokens = 0  # of all keys
        self.reserved_tokens = 0  # tokens of texts that are still being tokenized
        self.overload_until = -math.inf
        # Requests that are not read yet. What is added is counted by the thread that adds; what is
        # read or has ended, separately, under the lock.
        self._arrivals: deque[Request] = deque()
        self._added = self._added_tokens = 0
        self._read_tokens = 0
        self.ended = 0  # requests
        # Requests with texts that no round has taken: the oldest first; and by key, the key whose
        # turn is next first, and of each key the request whose turn is next.
        self._ages: OrderedDict[Request, None] = OrderedDict()
        self._turns: OrderedDict[Hashable, OrderedDict[Request, None]] = OrderedDict()
        # What long texts took beyond the turns of their keys. It comes off later turns.
        self._debts: dict[Hashable, int] = {}
        self._waiting_texts = self._waiting_tokens = self._round_tokens = 0
        self._round: deque[Work] = deque()

    @property
    def requests(self) -> int:
        """The number of requests that have not ended, including those that run."""
        return self._added - self.ended

    @property
    def has_arrivals(self) -> bool:
        """Whether there are requests to read."""
        return bool(self._arrivals)

    @property
    def waits(self) -> bool:
        """Whether there are texts that have not started."""
        return bool(self._round or self._ages or self._arrivals)

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

    def tokens_before_turn(self, key: Hashable) -> int:
        """Return the most tokens of this lane that start before a new, small request of `key`."""
        own = self.held.get(key)
        others = len(self.held) - (own is not None)
        return self.limits.tokens_before_turn(0 if own is None else own.requests, self.requests, others=others)

    def has_share(self, key: Hashable, tokens: int) -> bool:
        """Return whether `key` would hold no more than an equal share with this many tokens more.

        Always False if no other key holds anything.
        """
        own = self.held.get(key)
        keys = len(self.held) + (own is None)
        share = min(self.limits.max_queue_tokens, self._held_tokens) / keys
        return keys > 1 and tokens + (0 if own is None else own.tokens) <= share

    def hold(self, key: Hashable, tokens: int) -> None:
        """Count a call of `key` that begins."""
        held = self.held.setdefault(key, Held())
        self._held_tokens += tokens
        held.requests += 1
        held.tokens += tokens

    def release(self, key: Hashable, tokens: int) -> None:
        """Count a call of `key` that was held with this many tokens, and has ended."""
        held = self.held[key]
        self._held_tokens -= tokens
        held.requests -= 1
        held.tokens -= tokens
        if not held.requests:
            del self.held[key]

    def add(self, request: Request) -> None:
        """Add a request with at least one text. Its `tokens` may be estimated until it is read."""
        self._added += 1
        self._added_tokens += request.tokens
        request.unread_tokens = request.tokens
        self._arrivals.append(request)

    def drop(self, request: Request) -> None:
        """Start no more texts of a request. Texts that already run are finished and ignored."""
        self.ended += not request.ended
        request.ended = True
        self._forget(request)
        if request.unread_tokens:
            self._count_read(request)
            with suppress(ValueError):  # it has just been removed
                self._arrivals.remove(request)

    def queued(self) -> Iterator[Request]:
        """Yield every request that has texts in the queue, some of them twice."""
        for work in self._round:
            yield from (request for request, _ in work.parts)
        yield from self._ages
        yield from self._unread()

    def read_arrivals(self, now: float) -> None:
        """Read some of the requests that have arrived."""
        room = _READ_TOKENS
        while room > 0 and self._arrivals:
            request = self._arrivals.popleft()
            room -= 0 if request.is_counted else request.unread_tokens
            self._count_read(request)
            if not request.ended and request.deadline > now:
                if request.read():
                    self._ages[request] = self._turns.setdefault(request.key, OrderedDict())[request] = None
                    self._waiting_texts += request.waiting_texts
                    self._waiting_tokens += request.waiting_tokens
                else:
                    self.drop(request)

    def next_batch(self, now: float, *, at_once: bool) -> Work | None:
        """Return the next batch. Requests past their deadlines are left out.

        A batch that is not worth a worker waits for more texts, but not if `at_once`.
        """
        while True:
            if self._round:
                work = self._round.popleft()
                self._round_tokens -= work.tokens
                work.leave_out_dropped(now)
                if work.parts:
                    return work
            elif self._arrivals and self._waiting_tokens < self.limits.min_batch_tokens:
                self.read_arrivals(now)
            elif self._ages and (at_once or self._is_full() or now >= self.wake_at()):
                self._cut_round(now)
            else:
                return None

    def wake_at(self) -> float:
        """Return when a batch that waits for more texts leaves without them."""
        oldest = next(iter(self._ages), None)
        return math.inf if oldest is None else oldest.arrival + self.limits.max_delay_s

    def _is_full(self) -> bool:
        return self._waiting_tokens >= self.limits.min_batch_tokens

    def _count_read(self, request: Request) -> None:
        self._read_tokens += request.unread_tokens
        request.unread_tokens = 0

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
        # With several keys rounds stay small, so that a key with few requests is served soon.
        half = self.limits.half_round(len(self._ages) if len(self._turns) == 1 else 0)
        yield from self._pick_by_turns(now, half)
        room = half
        while room > 0 and (request := self._next_of(self._ages, now)) is not None:
            rows, tokens = self._take(request, room)
            room -= tokens
            yield request, rows

    def _pick_by_turns(self, now: float, room: int) -> Iterator[Part]:
        while self._turns and room > 0:
            key, requests = next(iter(self._turns.items()))
            left = self.limits.quantum - self._debts.pop(key, 0)
            while left > 0 and room > 0 and (request := self._next_of(requests, now)) is not None:
                requests.move_to_end(request)
                rows, tokens = self._take(request, self.limits.quantum)
                left, room = left - tokens, room - tokens
                yield request, rows
            if left < 0:
                self._debts[key] = -left
            if left <= 0 and key in self._turns:  # otherwise it goes on in the next round
                self._turns.move_to_end(key)
        if not self._turns:
            self._debts.clear()

    def _next_of(self, queue: OrderedDict[Request, None], now: float) -> Request | None:
        """Return the first request that is not past its deadline, and forget those before it."""
        while queue:
            request = next(iter(queue))
            if request.deadline > now:
                return request
            self._forget(request)
        return None

    def _take(self, request: Request, tokens: int) -> tuple[Indices, int]:
        """Take texts of a request, as many as fit into `tokens`; return them and their tokens."""
        rows = request.take(tokens)
        taken = int(request.lengths[rows].sum())
        self._waiting_texts -= len(rows)
        self._waiting_tokens -= taken
        if not request.waiting_texts:
            self._forget(request)
        return rows, taken

    def _forget(self, request: Request) -> None:
        if request in self._ages:
            del self._ages[request], self._turns[request.key][request]
            if not self._turns[request.key]:
                del self._turns[request.key]
            self._waiting_texts -= request.waiting_texts
            self._waiting_tokens -= request.waiting_tokens

    def _unread(self) -> list[Request]:
        return [request for request in list(self._arrivals) if not request.ended]  # a copy: others may add more
