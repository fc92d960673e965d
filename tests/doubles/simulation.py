"""A machine with a simulated clock, for tests of the scheduler."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.request import Request, Work
from sbert_infer.scheduling.scheduler import Scheduler

LIMITS = Limits(max_batch_tokens=512, min_batch_tokens=64, workers=2, max_length=256)
SPEED = 5000.0  # tokens per second and worker


def request(*lengths: int, arrival: float = 0.0, timeout: float = math.inf, **options: Any) -> Request:
    return Request(np.array(lengths), arrival=arrival, deadline=arrival + timeout, **options)


class Unread(Request):
    """A request whose tokens are counted when a worker reads it, if they can be counted at all."""

    def __init__(self, *lengths: int, guess: int, readable: bool, timeout: float) -> None:
        super().__init__(None, arrival=0.0, deadline=timeout)
        self.texts, self.tokens = len(lengths), guess
        self._hidden, self._readable = np.array(lengths), readable

    def read(self) -> bool:
        if self._readable:
            self.set_lengths(self._hidden)
        return self._readable


def rows(work: Work) -> list[tuple[Request, int]]:
    return [(owner, row) for owner, rows in work.parts for row in rows.tolist()]


@dataclass
class Start:
    """A batch that started."""

    time: float
    work: Work
    texts: list[tuple[Request, int]]


@dataclass
class Simulation:
    """Requests that arrive at given times, and workers whose batches take time by their tokens."""

    scheduler: Scheduler
    starts: list[Start] = field(default_factory=list)
    finished: dict[Request, float] = field(default_factory=dict)
    check: Callable[[float], None] = lambda now: None

    def run(self, requests: list[Request], cancels: dict[Request, float] | None = None) -> None:
        number = count()
        events: list[tuple[float, int, str, object]] = []

        def at(time: float, what: str, who: object = None) -> None:
            heapq.heappush(events, (time, next(number), what, who))

        for each in requests:
            at(each.arrival, "arrive", each)
        for each, time in (cancels or {}).items():
            at(time, "cancel", each)
        while events:
            now, _, what, who = heapq.heappop(events)
            self.happen(what, who, now)
            while (work := self.scheduler.next_batch(now)) is not None:
                self.starts.append(Start(now, work, rows(work)))
                work.padded_tokens = work.texts * work.length if work.length else work.tokens
                at(now + (work.padded_tokens + 16) / SPEED, "done", work)
            if now < (wake := self.scheduler.wake_at()) < math.inf:
                at(wake, "wake")
            self.check(now)

    def happen(self, what: str, who: object, now: float) -> None:
        if what == "arrive" and isinstance(who, Request):
            self.scheduler.add(who)
        elif what == "cancel" and isinstance(who, Request):
            self.scheduler.drop(who)
        elif what == "done" and isinstance(who, Work):
            for each in self.scheduler.done(who, now):
                assert each not in self.finished
                self.finished[each] = now

    def tokens_until(self, who: Request) -> int:
        """Return the tokens that started after its arrival and before its last batch."""
        mine = [index for index, start in enumerate(self.starts) if any(owner is who for owner, _ in start.texts)]
        between = [start for start in self.starts[: mine[-1]] if start.time >= who.arrival]
        return sum(start.work.tokens for start in between)


LENGTHS = st.integers(1, 64)
REQUESTS = st.builds(
    lambda gap, lengths, timeout, prompt: (gap, request(*lengths, timeout=timeout, prompt_length=prompt)),
    st.sampled_from([0.0, 0.0, 0.001, 0.02]),
    st.lists(LENGTHS, min_size=1, max_size=3) | st.lists(LENGTHS, min_size=1, max_size=60),
    st.just(math.inf) | st.sampled_from([0.001, 0.02, 0.1]),
    st.sampled_from([0, 0, 0, 3]),
) | st.builds(
    lambda gap, lengths, timeout, guess, readable: (
        gap,
        Unread(*lengths, guess=guess, readable=readable, timeout=timeout),
    ),
    st.sampled_from([0.0, 0.0, 0.001, 0.02]),
    st.lists(LENGTHS, min_size=1, max_size=3),
    st.just(math.inf) | st.sampled_from([0.001, 0.02, 0.1]),
    st.integers(1, 200),
    st.sampled_from([True, True, True, False]),
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[Limits, list[Request], dict[Request, float]]:
    """Draw limits, requests that arrive one after another, and when some of them are cancelled."""
    limits = Limits(
        max_batch_tokens=draw(st.integers(16, 256)),
        min_batch_tokens=draw(st.integers(1, 16)),
        workers=draw(st.integers(1, 3)),
        max_length=64,
        packed=draw(st.booleans()),
        max_delay_s=draw(st.sampled_from([0.0, 0.002, 0.05])),
    )
    now, requests, cancels = 0.0, [], {}
    for gap, each in draw(st.lists(REQUESTS, min_size=1, max_size=80)):
        now += gap
        each.arrival, each.deadline = now, now + each.deadline
        requests.append(each)
        if draw(st.integers(0, 5)) == 0:
            cancels[each] = now + draw(st.sampled_from([0.0, 0.001, 0.03]))
    return limits, requests, cancels


def natural_lengths(texts: int) -> list[int]:
    random = np.random.default_rng(0)
    return [int(length) for length in np.clip(random.lognormal(3.2, 0.6, texts), 4, 256)]
