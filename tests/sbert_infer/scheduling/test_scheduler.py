"""The queue under a simulated clock: nothing lost, nothing twice, nobody starved."""

from __future__ import annotations

import heapq
import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer import OverloadedError
from sbert_infer.scheduling.request import Request, Work
from sbert_infer.scheduling.scheduler import Limits, Scheduler
from sbert_infer.text.batching import cut_batches

LIMITS = Limits(max_batch_tokens=512, min_batch_tokens=64, workers=2, max_length=256)
SPEED = 5000.0  # tokens per second and worker


def request(*lengths: int, arrival: float = 0.0, timeout: float = math.inf, prompt_length: int = 0) -> Request:
    return Request(np.array(lengths), arrival=arrival, deadline=arrival + timeout, prompt_length=prompt_length)


class Unread(Request):
    """A request whose tokens are counted only when somebody asks, if they can be counted at all."""

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
    """Requests that arrive at their times, and workers that take as long as their batches have tokens."""

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
                at(now + (work.texts * work.length + 16) / SPEED, "done", work)
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
        """Tokens that started from its arrival until the last of its own did, in batches other than that."""
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
    """Limits, requests that arrive one after another, and when some of them are cancelled."""
    limits = Limits(
        max_batch_tokens=draw(st.integers(16, 256)),
        min_batch_tokens=draw(st.integers(1, 16)),
        workers=draw(st.integers(1, 3)),
        max_length=64,
        edges=draw(st.sampled_from([None, (8, 24, 64)])),
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


@settings(deadline=None)
@given(loads())
def test_each_text_runs_once_unless_dropped(load: tuple[Limits, list[Request], dict[Request, float]]) -> None:
    limits, requests, cancels = load
    simulation = Simulation(Scheduler(limits))
    simulation.run(requests, cancels)
    runs = Counter(text for start in simulation.starts for text in start.texts)
    assert set(runs.values()) <= {1}
    for each in requests:
        ran = sum(owner is each for owner, _ in runs)
        assert (each in simulation.finished) <= (ran == each.texts)
        if each.deadline == math.inf and each not in cancels:
            assert (each in simulation.finished) == each.read()
    assert (simulation.scheduler.queued_texts, simulation.scheduler.queued_tokens) == (0, 0)
    assert simulation.scheduler.requests == sum(not each.ended for each in requests)  # which nobody has dropped
    assert not simulation.scheduler.running


@settings(deadline=None)
@given(loads())
def test_batches_keep_to_the_limits(load: tuple[Limits, list[Request], dict[Request, float]]) -> None:
    limits, requests, cancels = load
    scheduler = Scheduler(limits)

    def check(now: float) -> None:
        assert len(scheduler.running) <= limits.workers

    simulation = Simulation(scheduler, check=check)
    simulation.run(requests, cancels)
    for start in simulation.starts:
        lengths = [int(owner.lengths[row]) for owner, row in start.texts]
        assert max(lengths) <= start.work.length <= 64
        assert start.work.length in (limits.edges or range(65))
        assert len(lengths) == 1 or len(lengths) * start.work.length <= limits.max_batch_tokens
        assert {owner.prompt_length for owner, _ in start.texts} == {start.work.prompt_length}
        assert all(start.time < owner.deadline for owner, _ in start.texts)
        assert all(start.time < cancels.get(owner, math.inf) or start.time == owner.arrival for owner, _ in start.texts)


@settings(deadline=None)
@given(loads())
def test_no_worker_idles_while_texts_wait(load: tuple[Limits, list[Request], dict[Request, float]]) -> None:
    limits, requests, cancels = load
    scheduler = Scheduler(limits)

    def check(now: float) -> None:
        if len(scheduler.running) < limits.workers and scheduler.queued_tokens:
            assert scheduler.running  # a lone request leaves at once
            assert scheduler.queued_tokens < limits.min_batch_tokens
            assert scheduler.oldest_age(now) < limits.max_delay_s

    Simulation(scheduler, check=check).run(requests, cancels)


SMALL = st.lists(LENGTHS, min_size=1, max_size=2)
LARGE = st.integers(50, 400).flatmap(lambda texts: st.builds(lambda length: [length] * texts, LENGTHS))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.02]), SMALL | LARGE), max_size=60), st.integers(1, 3))
def test_nobody_waits_for_more_than_the_bounds(arrivals: list[tuple[float, list[int]]], workers: int) -> None:
    limits = Limits(max_batch_tokens=64, min_batch_tokens=16, workers=workers, max_length=64)
    times = np.cumsum([gap for gap, _ in arrivals])
    requests = [request(*lengths, arrival=float(time)) for time, (_, lengths) in zip(times, arrivals, strict=True)]
    scheduler = Scheduler(limits)
    before: dict[Request, tuple[int, int]] = {}  # requests and tokens in the queue when it came

    class Watching(Simulation):
        def happen(self, what: str, who: object, now: float) -> None:
            if what == "arrive" and isinstance(who, Request):
                before[who] = sum(other not in self.finished for other in before), scheduler.queued_tokens
            super().happen(what, who, now)

    simulation = Watching(scheduler)
    simulation.run(requests)
    most = len(requests)
    round_tokens = 2 * (limits.half_round(most) + limits.quantum)
    for each in requests:
        others, tokens = before[each]
        waited = simulation.tokens_until(each)
        rounds = 1 + math.ceil((tokens + each.tokens) / limits.half_round(0))
        assert waited <= rounds * round_tokens  # by age
        if each.tokens <= limits.quantum:
            assert waited <= limits.tokens_before_turn(others, most)  # by turns


@pytest.mark.parametrize("length", [8, 28, 250])
def test_one_text_is_not_held_up_by_thousands(length: int) -> None:
    large = [request(*[28] * 2048, arrival=number / 1000) for number in range(3)]
    small = request(length, arrival=1.0)
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run([*large, small])
    assert simulation.tokens_until(small) <= LIMITS.tokens_before_turn(3) < 0.1 * 3 * 2048 * 28
    assert simulation.finished[small] < 0.2 * min(simulation.finished[each] for each in large)


def test_thousands_of_texts_are_not_held_up_by_a_flood_of_single_ones() -> None:
    large = request(*[28] * 512, arrival=1.0)
    flood = [request(28, arrival=number / 1000) for number in range(8000)]  # nearly three times what can be done
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run([*flood, large])
    ahead = sum(each.tokens for each in flood if each.arrival <= 1.0)
    assert simulation.finished[large] - large.arrival < 2.2 * (ahead + large.tokens) / (2 * SPEED)
    assert simulation.finished[large] < 0.5 * max(simulation.finished.values())


@pytest.mark.parametrize(("flood", "other"), [(256, 5), (5, 256)])
def test_neither_short_nor_long_texts_starve(flood: int, other: int) -> None:
    gap = flood / (4 * SPEED)  # twice what two workers do
    many = [request(flood, arrival=number * gap) for number in range(400)]
    few = [request(other, arrival=number * 40 * gap + gap / 2) for number in range(10)]
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run(sorted([*many, *few], key=lambda each: each.arrival))
    for each in few:
        waited = [simulation.finished[peer] - peer.arrival for peer in many if abs(peer.arrival - each.arrival) < gap]
        slack = LIMITS.tokens_before_turn(0) / (2 * SPEED)
        assert simulation.finished[each] - each.arrival <= max(waited) + slack


def test_a_lone_request_leaves_at_once_and_has_the_machine_to_itself() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(request(5, arrival=1.0))
    work = scheduler.next_batch(1.0)
    assert work is not None
    assert work.alone


def test_while_others_run_a_batch_leaves_when_it_is_full_or_the_oldest_has_waited() -> None:
    scheduler = Scheduler(replace(LIMITS, workers=3, max_delay_s=0.5))
    scheduler.add(request(5))
    assert scheduler.next_batch(0.0) is not None
    scheduler.add(request(30, arrival=0.1))
    assert scheduler.next_batch(0.2) is None
    assert scheduler.wake_at() == 0.6
    late = scheduler.next_batch(0.6)
    assert late is not None
    assert not late.alone
    scheduler.add(request(32, arrival=0.7))
    assert scheduler.next_batch(0.7) is None
    scheduler.add(request(32, arrival=0.7))
    full = scheduler.next_batch(0.7)
    assert full is not None
    assert full.texts == 2


def test_a_small_request_is_shared_among_the_free_workers() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(request(*[20] * 10))
    first, second = scheduler.next_batch(0.0), scheduler.next_batch(0.0)
    assert first is not None
    assert second is not None
    assert (first.texts, second.texts) == (5, 5)
    assert not first.alone


def natural_lengths(texts: int) -> list[int]:
    random = np.random.default_rng(0)
    return [int(length) for length in np.clip(random.lognormal(3.2, 0.6, texts), 4, 256)]


@pytest.mark.parametrize(("texts_each", "most"), [(2048, 1.01), (64, 1.08), (16, 1.08), (1, 1.05)])
def test_under_load_batches_cost_little_more_than_those_of_encode(texts_each: int, most: float) -> None:
    lengths = natural_lengths(2048)
    requests = [request(*lengths[start : start + texts_each]) for start in range(0, 2048, texts_each)]
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run(requests)

    def cost(batches: list[tuple[int, int]]) -> int:
        return sum(texts * length + 16 for texts, length in batches)

    best = cost([(len(batch.rows), batch.length) for batch in cut_batches(np.array(lengths), 512)])
    live = cost([(start.work.texts, start.work.length) for start in simulation.starts])
    assert live <= most * best


def loaded(tokens: int, limits: Limits = LIMITS) -> Scheduler:
    """A scheduler that has measured some 1,000 tokens/s, two full batches running, and has `tokens` in its queue."""
    scheduler = Scheduler(limits)
    for _ in range(4):
        scheduler.add(request(*[128] * 4))
    works = [scheduler.next_batch(0.0), scheduler.next_batch(0.0)]
    for work in works:
        assert work is not None
        scheduler.done(work, 1.0)
    assert [scheduler.next_batch(1.0) is not None for _ in range(2)] == [True, True]
    if tokens:
        scheduler.add(request(*[128] * (tokens // 128), arrival=1.0))
    assert scheduler.queued_tokens == tokens
    return scheduler


def test_speed_is_what_comes_out_while_more_waits() -> None:
    scheduler = loaded(0)
    assert scheduler.tokens_per_s == pytest.approx((0.9 * 512 + 512) / 0.9)  # two at once after a second
    for each in list(scheduler.running):
        scheduler.done(each, 100.0)  # nothing waits: it may have been idle
    assert scheduler.tokens_per_s == pytest.approx((0.9 * 512 + 512) / 0.9)
    scheduler = Scheduler(LIMITS)
    scheduler.add(request(5))
    work = scheduler.next_batch(0.0)
    assert work is not None
    scheduler.done(work, 1.0)
    assert scheduler.tokens_per_s is None


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    scheduler = loaded(4096, replace(LIMITS, max_queue_tokens=5000))
    scheduler.check(904, math.inf, 1.0)
    with pytest.raises(OverloadedError, match=r"full: 4096 of 5000 tokens, and 1904 more; retry in") as refusal:
        scheduler.check(1904, math.inf, 1.0)
    speed = scheduler.tokens_per_s
    assert speed is not None
    assert refusal.value.retry_after_s == pytest.approx(1000 / speed)
    with pytest.raises(ValueError, match="5001 tokens, more than max_queue_tokens=5000: send fewer"):
        scheduler.check(5001, math.inf, 1.0)


def test_texts_that_are_being_tokenized_count() -> None:
    scheduler = Scheduler(replace(LIMITS, max_queue_tokens=100))
    scheduler.reserved_tokens += 60
    scheduler.check(40, math.inf, 0.0)
    with pytest.raises(OverloadedError) as refusal:
        scheduler.check(41, math.inf, 0.0)
    assert refusal.value.retry_after_s == 1.0  # no speed is known yet


def test_what_can_not_be_done_in_time_is_refused_at_once() -> None:
    scheduler = loaded(0)
    scheduler.add(request(*[128] * 400, arrival=1.0))
    speed = scheduler.tokens_per_s
    assert speed is not None
    need = (2 * 512 + 51200 + 5120) / speed
    scheduler.check(5120, 1.0 + need / 0.59, 1.0)
    with pytest.raises(OverloadedError, match="too long") as refusal:
        scheduler.check(5120, 1.0 + need / 0.61, 1.0)
    assert refusal.value.retry_after_s == pytest.approx(need - 0.6 * need / 0.61)
    scheduler.check(10, 1.0 + need / 4, 1.0)  # a small one does not have to wait for all of that


def test_with_hardly_anything_ahead_any_deadline_is_tried() -> None:
    scheduler = loaded(0)
    with pytest.raises(OverloadedError):
        scheduler.check(100_000, 31.0, 1.0)
    for work in list(scheduler.running):
        scheduler.done(work, 2.0)
    scheduler.check(100_000, 2.001, 2.0)
    scheduler.add(request(100, arrival=2.0))
    scheduler.check(100_000, 2.001, 2.0)


def test_small_batches_of_a_few_callers_say_nothing_of_the_speed() -> None:
    scheduler = Scheduler(LIMITS)
    for number in range(50):  # 3 ms for each batch of 4 tokens: far below what full batches would do
        while scheduler.requests < 8:
            scheduler.add(request(4, arrival=number * 0.003))
        while (work := scheduler.next_batch(number * 0.003)) is not None:
            assert work.tokens < 100
        for work in list(scheduler.running):
            scheduler.done(work, number * 0.003 + 0.003)
    assert scheduler.tokens_per_s is None
    scheduler.check(40_000, 30.0, 0.2)


def test_hundreds_may_wait_as_long_as_they_like_but_more_may_not() -> None:
    scheduler = loaded(0)  # with two that run
    for _ in range(253):
        scheduler.add(request(128, arrival=1.0))
    scheduler.check(10, math.inf, 1.0)
    scheduler.add(request(128, arrival=1.0))
    with pytest.raises(OverloadedError, match=r"too long: 256 requests, 31\.0 s") as refusal:
        scheduler.check(10, math.inf, 1.0)
    speed = scheduler.tokens_per_s
    assert speed is not None
    assert refusal.value.retry_after_s == pytest.approx((2 * 512 + 254 * 128) / speed - LIMITS.max_wait_s)
    scheduler.drop_all()
    for _ in range(100):
        scheduler.add(request(128, arrival=1.0))
    with pytest.raises(OverloadedError, match=r"too long: 102 requests, 12\.8 s"):
        scheduler.check(10, math.inf, 10.9)  # there was an overload: what is left of it is enough to wait for
    scheduler.check(10, math.inf, 11.1)
    patient = loaded(0, replace(LIMITS, max_wait_s=60.0))
    for _ in range(256):
        patient.add(request(128, arrival=1.0))
    patient.check(10, math.inf, 1.0)


class Admitting(Simulation):
    """Asks, for each request, whether it is let in."""

    refused = 0

    def happen(self, what: str, who: object, now: float) -> None:
        if what == "arrive" and isinstance(who, Request):
            try:
                self.scheduler.check(who.tokens, who.deadline, now)
            except OverloadedError:
                self.refused += 1
                return
        super().happen(what, who, now)


def arriving(load: float, timeout: float) -> list[Request]:
    """Requests of 1 to 64 texts that bring `load` times the tokens that two workers can do."""
    random, lengths = np.random.default_rng(1), natural_lengths(20_000)
    requests, used, now = [], 0, 0.0
    while used < len(lengths):
        size = int(random.choice([1, 1, 1, 1, 4, 64]))
        requests.append(request(*lengths[used : used + size], arrival=now, timeout=timeout))
        now += requests[-1].tokens / (load * 2 * SPEED)
        used += size
    return requests


def test_calls_that_are_let_in_are_done_in_time_at_five_times_the_load() -> None:
    def goodput(simulation: Simulation) -> float:
        good = sum(each.tokens for each, done in simulation.finished.items() if done <= each.deadline)
        return good / max(simulation.finished.values())

    peak = Simulation(Scheduler(LIMITS))
    peak.run(arriving(load=5, timeout=math.inf))
    overloaded = Admitting(Scheduler(LIMITS))
    requests = arriving(load=5, timeout=2.0)
    overloaded.run(requests)
    in_time = sum(done <= each.deadline for each, done in overloaded.finished.items())
    assert overloaded.refused + in_time >= 0.99 * len(requests)
    assert goodput(overloaded) >= 0.9 * goodput(peak)


def test_when_a_flood_is_over_the_queue_is_soon_empty() -> None:
    requests = [request(16, arrival=number / 3000, timeout=30.0) for number in range(30_000)]
    flooded = Admitting(Scheduler(LIMITS))
    flooded.run(requests)
    waits = [done - each.arrival for each, done in flooded.finished.items()]
    assert len(waits) + flooded.refused == len(requests)
    assert flooded.refused > 0.7 * len(requests)  # it is five times what can be done
    assert LIMITS.max_wait_s < max(waits) < 1.2 * LIMITS.max_wait_s


def test_on_a_slow_machine_a_flood_leaves_no_more_than_on_a_fast_one() -> None:
    requests = [request(128, arrival=number / 400, timeout=30.0) for number in range(2400)]  # five times too many
    flooded = Admitting(Scheduler(LIMITS))
    flooded.run(requests)
    waits = [done - each.arrival for each, done in flooded.finished.items() if each.arrival > 5.0]
    assert 3 * LIMITS.max_wait_s < 256 * 128 / (2 * SPEED)  # those who come first may wait for longer
    assert max(waits) < 1.2 * LIMITS.max_wait_s


def test_a_worker_that_is_free_first_leaves_some_for_the_others() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(request(*[100] * 4))
    first, second = scheduler.next_batch(0.0), scheduler.next_batch(0.0)
    assert first is not None
    assert second is not None
    scheduler.add(request(*[20] * 10))
    scheduler.done(first, 0.1)
    third = scheduler.next_batch(0.1)
    assert third is not None
    assert third.texts == 5  # the other five are for whoever is free next


def test_a_batch_that_was_abandoned_finishes_nobody() -> None:
    scheduler = Scheduler(LIMITS)
    only = request(5)
    scheduler.add(only)
    work = scheduler.next_batch(0.0)
    assert work is not None
    assert scheduler.abandon(work)
    assert not scheduler.abandon(work)
    assert scheduler.done(work, 1.0) == []
    assert not scheduler.running


def test_drop_all_names_each_request_once() -> None:
    scheduler = Scheduler(LIMITS)
    large, small = request(*[100] * 200), request(7)
    scheduler.add(large)
    assert scheduler.next_batch(0.0) is not None  # the rest of its round is planned, more waits
    scheduler.add(small)
    assert sorted(scheduler.drop_all(), key=lambda each: each.tokens) == [small, large]
    assert scheduler.next_batch(0.0) is None
    assert scheduler.queued_texts == 0


def test_the_age_of_the_oldest() -> None:
    scheduler = Scheduler(LIMITS)
    assert scheduler.oldest_age(5.0) == 0
    scheduler.add(request(*[250] * 100, arrival=1.0))
    scheduler.add(request(5, arrival=2.0))
    assert scheduler.oldest_age(5.0) == 4.0
    scheduler.next_batch(5.0)  # what was taken for a round still waits
    assert scheduler.oldest_age(5.0) == 4.0
    scheduler.drop_all()
    assert scheduler.oldest_age(5.0) == 0


def test_nothing_is_read_for_a_worker_that_would_get_nothing() -> None:
    scheduler = Scheduler(LIMITS)
    for _ in range(2):
        scheduler.add(request(100))
        assert scheduler.may_read
        assert scheduler.next_batch(0.0) is not None
    scheduler.add(request(100))
    assert not scheduler.may_read  # or a third worker, of a backend that was replaced, would ask again and again
    assert scheduler.next_batch(0.0) is None
    scheduler.done(next(iter(scheduler.running)), 1.0)
    assert scheduler.may_read


def test_much_that_has_arrived_is_read_some_at_a_time() -> None:
    class Counting(Unread):
        def read(self) -> bool:
            done.append(self)
            return super().read()

    done: list[Request] = []
    scheduler = Scheduler(LIMITS)
    for _ in range(100):
        scheduler.add(Counting(200, guess=200, readable=True, timeout=math.inf))
    assert scheduler.next_batch(0.0) is not None
    assert len(done) * 200 < 2048 + 200  # whoever reads holds the lock
    simulation = Simulation(scheduler)
    for work in list(scheduler.running):
        scheduler.done(work, 1.0)
    simulation.run([request(5, arrival=1.0)])
    assert len(done) == 100


@pytest.mark.parametrize(("counted", "most"), [(True, 6), (False, 9)])  # 5 would hold all
def test_where_only_large_batches_are_worth_it_they_are_large(counted: bool, most: int) -> None:
    limits = Limits(max_batch_tokens=16_384, min_batch_tokens=16_384, workers=1, max_length=512)
    scheduler = Scheduler(limits)  # as on a GPU
    for _ in range(200):
        scheduler.add(request(400) if counted else Unread(400, guess=300, readable=True, timeout=math.inf))
    simulation = Simulation(scheduler)
    simulation.run([request(400)])
    assert sum(start.work.tokens for start in simulation.starts) == 201 * 400
    assert len(simulation.starts) <= most


def test_an_unread_request_that_is_dropped_is_not_kept() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(request(5))  # nobody reads it yet
    gone = request(7)
    scheduler.add(gone)
    scheduler.drop(gone)
    assert (scheduler.queued_texts, scheduler.queued_tokens, scheduler.requests) == (1, 5, 1)
    kept = weakref.ref(gone)
    del gone
    assert kept() is None
