"""The queue under a simulated clock: no text is lost or runs twice, and no request starves."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.request import Request
from sbert_infer.scheduling.scheduler import Scheduler
from sbert_infer.text.batching import cut_batches
from tests.doubles.simulation import LENGTHS, LIMITS, SPEED, Simulation, Unread, loads, natural_lengths, request


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
    assert simulation.scheduler.requests == sum(not each.ended for each in requests)  # those that were not dropped
    assert not simulation.scheduler.running


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
        if limits.packed:
            assert start.work.length is None
            assert len(lengths) == 1 or sum(lengths) <= limits.max_batch_tokens
        else:
            assert start.work.length is not None
            assert max(lengths) <= start.work.length <= 64
            assert len(lengths) == 1 or len(lengths) * start.work.length <= limits.max_batch_tokens
        assert {owner.prompt_length for owner, _ in start.texts} == {start.work.prompt_length}
        assert all(start.time < owner.deadline for owner, _ in start.texts)
        assert all(start.time < cancels.get(owner, math.inf) or start.time == owner.arrival for owner, _ in start.texts)


@given(loads())
def test_no_worker_idles_while_texts_wait(load: tuple[Limits, list[Request], dict[Request, float]]) -> None:
    limits, requests, cancels = load
    scheduler = Scheduler(limits)

    def check(now: float) -> None:
        if len(scheduler.running) < limits.workers and scheduler.queued_tokens:
            assert scheduler.running  # a single request starts at once
            assert scheduler.queued_tokens < limits.min_batch_tokens
            assert scheduler.oldest_age(now) < limits.max_delay_s

    Simulation(scheduler, check=check).run(requests, cancels)


SMALL = st.lists(LENGTHS, min_size=1, max_size=2)
LARGE = st.integers(50, 400).flatmap(lambda texts: st.builds(lambda length: [length] * texts, LENGTHS))


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.02]), SMALL | LARGE), max_size=60),
    st.integers(1, 3),
    st.sampled_from([16, 64]),
)
def test_nobody_waits_for_more_than_the_bounds(
    arrivals: list[tuple[float, list[int]]], workers: int, batch: int
) -> None:
    limits = Limits(max_batch_tokens=batch, min_batch_tokens=16, workers=workers, max_length=64)
    times = np.cumsum([gap for gap, _ in arrivals])
    requests = [request(*lengths, arrival=float(time)) for time, (_, lengths) in zip(times, arrivals, strict=True)]
    scheduler = Scheduler(limits)
    before: dict[Request, tuple[int, int]] = {}  # queued requests and tokens at its arrival

    class Watching(Simulation):
        def happen(self, what: str, who: object, now: float) -> None:
            if what == "arrive" and isinstance(who, Request):
                before[who] = sum(other not in self.finished for other in before), scheduler.queued_tokens
            super().happen(what, who, now)

    simulation = Watching(scheduler)
    simulation.run(requests)
    most = len(requests)
    round_tokens = 2 * (limits.half_round(most) + limits.longest)
    for each in requests:
        others, tokens = before[each]
        waited = simulation.tokens_until(each)
        rounds = 1 + math.ceil((tokens + each.tokens) / limits.half_round(0))
        assert waited <= rounds * round_tokens  # the bound by age
        if each.tokens <= limits.quantum:
            assert waited <= limits.tokens_before_turn(others, most)  # the bound by turns


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
    flood = [request(28, arrival=number / 1000) for number in range(8000)]  # nearly three times the capacity
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run([*flood, large])
    ahead = sum(each.tokens for each in flood if each.arrival <= 1.0)
    assert simulation.finished[large] - large.arrival < 2.2 * (ahead + large.tokens) / (2 * SPEED)
    assert simulation.finished[large] < 0.5 * max(simulation.finished.values())


@pytest.mark.parametrize(("flood", "other"), [(256, 5), (5, 256)])
def test_neither_short_nor_long_texts_starve(flood: int, other: int) -> None:
    gap = flood / (4 * SPEED)  # twice the capacity of two workers
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


@pytest.mark.parametrize(("texts_each", "most"), [(2048, 1.01), (64, 1.08), (16, 1.08), (1, 1.05)])
def test_under_load_batches_cost_little_more_than_those_of_encode(texts_each: int, most: float) -> None:
    lengths = natural_lengths(2048)
    requests = [request(*lengths[start : start + texts_each]) for start in range(0, 2048, texts_each)]
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run(requests)

    def cost(batches: list[tuple[int, int]]) -> int:
        return sum(texts * length + 16 for texts, length in batches)

    best = cost([(len(batch.texts), batch.length) for batch in cut_batches(np.array(lengths), 512)])
    live = cost([(start.work.texts, start.work.length or 0) for start in simulation.starts])
    assert live <= most * best


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
    assert third.texts == 5  # the other five are for the next free worker


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
    assert scheduler.next_batch(0.0) is not None  # other batches of its round, and more texts, wait
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
    scheduler.next_batch(5.0)  # texts that were taken for a round still wait
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
    assert not scheduler.may_read  # otherwise a worker of a replaced backend would ask again and again
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
    assert len(done) * 200 < 2048 + 200  # the worker that reads holds the lock
    simulation = Simulation(scheduler)
    for work in list(scheduler.running):
        scheduler.done(work, 1.0)
    simulation.run([request(5, arrival=1.0)])
    assert len(done) == 100


@pytest.mark.parametrize(("counted", "most"), [(True, 6), (False, 9)])  # 5 full batches would hold all
def test_where_only_large_batches_are_worth_it_they_are_large(counted: bool, most: int) -> None:
    limits = Limits(max_batch_tokens=16_384, min_batch_tokens=16_384, workers=1, max_length=512)
    scheduler = Scheduler(limits)  # like on a GPU
    for _ in range(200):
        scheduler.add(request(400) if counted else Unread(400, guess=300, readable=True, timeout=math.inf))
    simulation = Simulation(scheduler)
    simulation.run([request(400)])
    assert sum(start.work.tokens for start in simulation.starts) == 201 * 400
    assert len(simulation.starts) <= most


def test_an_unread_request_that_is_dropped_is_not_kept() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(request(5))  # not read yet
    gone = request(7)
    scheduler.add(gone)
    scheduler.drop(gone)
    assert (scheduler.queued_texts, scheduler.queued_tokens, scheduler.requests) == (1, 5, 1)
    kept = weakref.ref(gone)
    del gone
    assert kept() is None


def test_tokens_and_padding_of_a_batch_count_at_the_same_moment() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.add(request(3, 5))
    work = scheduler.next_batch(0.0)
    assert work is not None
    assert (scheduler.batch_tokens, scheduler.padded_tokens) == (0, 0)
    work.padded_tokens = 10
    scheduler.done(work, 1.0)
    assert (scheduler.batch_tokens, scheduler.padded_tokens) == (8, 10)
