"""Which calls the queue accepts, and which it refuses at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sbert_infer import CallTooLargeError, OverloadedError
from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.request import Request
from sbert_infer.scheduling.scheduler import Scheduler
from tests.doubles.simulation import LIMITS, SPEED, Simulation, natural_lengths, request


def loaded(tokens: int, limits: Limits = LIMITS) -> Scheduler:
    """Return a scheduler at about 1,000 tokens/s, with two running batches and `tokens` queued."""
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
    assert scheduler.tokens_per_s == pytest.approx((0.9 * 512 + 512) / 0.9)  # two batches after one second
    for each in list(scheduler.running):
        scheduler.done(each, 100.0)  # nothing waits, so the workers may have been idle
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
    scheduler.lanes["interactive"].reserved_tokens += 60
    scheduler.check(40, math.inf, 0.0)
    with pytest.raises(OverloadedError) as refusal:
        scheduler.check(41, math.inf, 0.0)
    assert refusal.value.retry_after_s == 1.0  # no speed was measured yet


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
    scheduler.check(10, 1.0 + need / 4, 1.0)  # a small request need not wait for all of that


def test_with_hardly_anything_ahead_any_deadline_is_tried() -> None:
    scheduler = loaded(0)
    with pytest.raises(OverloadedError):
        scheduler.check(25_000, 31.0, 1.0)
    for work in list(scheduler.running):
        scheduler.done(work, 2.0)
    scheduler.check(100_000, 2.001, 2.0)
    scheduler.add(request(100, arrival=2.0))
    scheduler.check(100_000, 2.001, 2.0)


def test_what_can_never_be_done_in_time_is_no_overload() -> None:
    scheduler = loaded(0)
    speed = scheduler.tokens_per_s
    assert speed is not None
    with pytest.raises(CallTooLargeError, match="send at most") as refusal:
        scheduler.check(int(speed * 10) + 1, 11.0, 1.0)
    assert refusal.value.limit == int(speed * 6)
    with pytest.raises(OverloadedError):
        scheduler.check(int(speed * 10) - 1, 11.0, 1.0)
    scheduler.check_possible(int(speed * 10) - 1, 10.0)


def test_small_batches_of_a_few_callers_say_nothing_of_the_speed() -> None:
    scheduler = Scheduler(LIMITS)
    for number in range(50):  # 3 ms for 4 tokens: much slower than full batches
        while scheduler.requests < 8:
            scheduler.add(request(4, arrival=number * 0.003))
        while (work := scheduler.next_batch(number * 0.003)) is not None:
            assert work.tokens < 100
        for work in list(scheduler.running):
            scheduler.done(work, number * 0.003 + 0.003)
    assert scheduler.tokens_per_s is None
    scheduler.check(40_000, 30.0, 0.2)


def queue(scheduler: Scheduler, requests: int) -> None:
    for _ in range(requests):
        scheduler.lanes["interactive"].hold(None, 128)
        scheduler.add(request(128, arrival=1.0))


def test_hundreds_may_wait_as_long_as_they_like_but_more_may_not() -> None:
    scheduler = loaded(0)  # has two running batches
    queue(scheduler, 253)
    scheduler.check(10, math.inf, 1.0)
    queue(scheduler, 1)
    with pytest.raises(OverloadedError, match=r"too long: 256 requests, 31\.0 s") as refusal:
        scheduler.check(10, math.inf, 1.0)
    speed = scheduler.tokens_per_s
    assert speed is not None
    assert refusal.value.retry_after_s == pytest.approx((2 * 512 + 254 * 128) / speed - LIMITS.max_wait_s)
    scheduler.drop_all()
    queue(scheduler, 100)
    with pytest.raises(OverloadedError, match=r"too long: 102 requests, 12\.8 s"):
        scheduler.check(10, math.inf, 10.9)  # the overload is not over yet
    scheduler.check(10, math.inf, 11.1)
    patient = loaded(0, replace(LIMITS, max_wait_s=60.0))
    queue(patient, 256)
    patient.check(10, math.inf, 1.0)


class Admitting(Simulation):
    """Checks, for each request, whether it is accepted, as `AsyncEngine` does."""

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
    """Return requests of 1 to 64 texts that need `load` times the speed of two workers."""
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
    assert flooded.refused > 0.7 * len(requests)  # the load is five times the capacity
    assert LIMITS.max_wait_s < max(waits) < 1.2 * LIMITS.max_wait_s


def test_on_a_slow_machine_a_flood_leaves_no_more_than_on_a_fast_one() -> None:
    requests = [request(128, arrival=number / 400, timeout=30.0) for number in range(2400)]  # five times the capacity
    flooded = Admitting(Scheduler(LIMITS))
    flooded.run(requests)
    waits = [done - each.arrival for each, done in flooded.finished.items() if each.arrival > 5.0]
    assert 3 * LIMITS.max_wait_s < 256 * 128 / (2 * SPEED)  # the first ones may wait longer
    assert max(waits) < 1.2 * LIMITS.max_wait_s
