"""Interactive beside bulk, and keys beside each other, under a simulated clock."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer import CallTooLargeError, OverloadedError
from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.request import Request
from sbert_infer.scheduling.scheduler import Scheduler
from sbert_infer.types import BULK, INTERACTIVE, Priority
from tests.doubles.simulation import LENGTHS, LIMITS, SPEED, Simulation, request

SPARE = replace(LIMITS, spare_workers=1)
BATCH_S = (512 + 16) / SPEED


def percentile(simulation: Simulation, requests: list[Request], q: float) -> float:
    return float(np.percentile([simulation.finished[each] - each.arrival for each in requests], q))


def bulk_beside(queries: list[Request], limits: Limits, seconds: float) -> tuple[Simulation, list[Request]]:
    """Run queries beside three clients, each of which has its next 256 texts ready all the time."""
    each = 256 * 28 / (2 * SPEED / 3)
    bulk = [
        request(*[28] * 256, arrival=client / 10 + number * each, priority=BULK)
        for client in range(3)
        for number in range(math.ceil(seconds / each))
    ]
    simulation = Simulation(Scheduler(limits))
    simulation.run(sorted([*bulk, *queries], key=lambda one: one.arrival))
    return simulation, bulk


def test_a_query_beside_bulk_starts_at_once_where_a_worker_is_spared_for_it() -> None:
    queries = [request(12, arrival=1.0 + number / 10) for number in range(100)]
    simulation, _ = bulk_beside(queries, SPARE, 12.0)
    assert percentile(simulation, queries, 100) == pytest.approx((12 + 16) / SPEED)


def test_without_a_spare_worker_a_query_waits_for_one_batch_at_most() -> None:
    queries = [request(12, arrival=1.0 + number / 10) for number in range(100)]
    simulation, _ = bulk_beside(queries, LIMITS, 12.0)
    assert percentile(simulation, queries, 100) <= BATCH_S + (12 + 16) / SPEED


def test_queries_cost_bulk_no_more_than_their_own_time() -> None:
    def bulk_ends(queries: list[Request]) -> float:
        simulation, bulk = bulk_beside(queries, LIMITS, 12.0)
        return max(simulation.finished[each] for each in bulk)

    queries = [request(12, arrival=1.0 + number / 20) for number in range(200)]
    own = sum(each.tokens + 16 for each in queries) / (2 * SPEED)
    assert bulk_ends(queries) <= bulk_ends([]) + own + 2 * BATCH_S


@pytest.mark.parametrize("limits", [LIMITS, SPARE])
def test_bulk_has_a_quarter_beside_a_flood_of_queries(limits: Limits) -> None:
    flood = [request(28, arrival=number / 2000) for number in range(20_000)]  # over five times the capacity
    large = request(*[28] * 512, arrival=1.0, priority=BULK)
    simulation = Simulation(Scheduler(limits))
    simulation.run([*flood, large])
    alone = large.tokens * (512 + 16) / 512 / (2 * SPEED)
    assert simulation.finished[large] - large.arrival <= 4.4 * alone + 2 * BATCH_S
    served = [start for start in simulation.starts if 1.0 <= start.time < simulation.finished[large]]
    share = sum(start.work.tokens for start in served if start.work.priority == INTERACTIVE)
    assert share >= 2.5 * large.tokens  # and no more than that, as bulk has three quarters at most


SMALL = st.tuples(st.just(INTERACTIVE), st.lists(LENGTHS, min_size=1, max_size=2))
LARGE = st.tuples(st.just(BULK), st.lists(LENGTHS, min_size=1, max_size=80))
GAPS = st.sampled_from([0.0, 0.001, 0.02])
ARRIVALS = st.lists(st.tuples(GAPS, SMALL | SMALL | LARGE, st.sampled_from("aaab")), max_size=80)


class Watching(Simulation):
    """Notes what waits in a request's lane when it arrives, and how many of its key."""

    def happen(self, what: str, who: object, now: float) -> None:
        if what == "arrive" and isinstance(who, Request):
            lane = self.scheduler.lanes[who.priority]
            before[who] = lane.queued_tokens, sum(one not in self.finished for one in before if same(one, who))
        super().happen(what, who, now)


before: dict[Request, tuple[int, int]] = {}


def same(one: Request, other: Request) -> bool:
    return one.priority == other.priority and one.key == other.key


@given(ARRIVALS, st.integers(1, 3), st.integers(0, 1), st.sampled_from([16, 64]))
def test_nobody_waits_for_more_than_the_bounds(
    arrivals: list[tuple[float, tuple[str, list[int]], str]], workers: int, spare: int, batch: int
) -> None:
    before.clear()
    limits = Limits(max_batch_tokens=batch, min_batch_tokens=16, workers=workers, max_length=64, spare_workers=spare)
    times = np.cumsum([gap for gap, *_ in arrivals])
    requests = [
        request(*lengths, arrival=float(time), priority=priority, key=key)
        for time, (_, (priority, lengths), key) in zip(times, arrivals, strict=True)
    ]
    simulation = Watching(Scheduler(limits))
    simulation.run(requests)
    assert set(simulation.finished) == set(requests)
    longest, most = limits.longest, len(requests)
    round_tokens = 2 * (limits.half_round(most) + longest)
    for each in requests:
        tokens, of_key = before[each]
        by_age = (1 + math.ceil((tokens + each.tokens) / limits.half_round(0))) * round_tokens
        by_turns = limits.tokens_before_turn(of_key, most, others=1) if each.tokens <= limits.quantum else math.inf
        own = min(by_age, by_turns)  # tokens of its own lane
        waited = simulation.tokens_until(each)
        if each.priority == INTERACTIVE:
            assert waited <= own + own / 3 + 3 * longest
        else:
            assert waited <= own + 3 * own + 5 * longest


def test_a_flood_of_one_key_does_not_hold_up_another() -> None:
    flood = [request(28, arrival=number / 1500, key="flood") for number in range(15_000)]
    others = [request(28, arrival=1.0 + number / 4, key="other") for number in range(20)]
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run(sorted([*flood, *others], key=lambda one: one.arrival))
    beside = [one for one in flood if 1.0 <= one.arrival < 6.0]
    bound = 1.1 * LIMITS.tokens_before_turn(0, 1000, others=1) / (2 * SPEED)
    assert percentile(simulation, others, 100) <= bound < 0.5 * percentile(simulation, beside, 50)


def test_keys_that_want_more_than_there_is_get_equal_shares() -> None:
    short = [request(20, arrival=number / 1000, key="short") for number in range(6000)]
    long = [request(250, arrival=number / 80, key="long") for number in range(480)]
    simulation = Simulation(Scheduler(LIMITS))
    simulation.run(sorted([*short, *long], key=lambda one: one.arrival))

    def tokens(requests: list[Request]) -> int:
        return sum(each.tokens for each in requests if 2.0 <= simulation.finished[each] < 6.0)

    # The half that is taken by age follows what was sent: the same of each.
    assert tokens(short) == pytest.approx(tokens(long), rel=0.2)


def filled(priority: Priority, key: str, tokens: int) -> Scheduler:
    """Return a scheduler at 1,000 tokens/s, in which a key holds this many tokens."""
    scheduler = Scheduler(replace(LIMITS, max_queue_tokens=100_000, max_wait_s=1.0))
    for _ in range(4):
        scheduler.add(request(*[128] * 4))
    for work in [scheduler.next_batch(0.0), scheduler.next_batch(0.0)]:
        assert work is not None
        scheduler.done(work, 1.0)
    lane = scheduler.lanes[priority]
    for _ in range(tokens // 100):
        lane.hold(key, 100)
        scheduler.add(request(100, arrival=1.0, priority=priority, key=key))
    return scheduler


def test_a_full_lane_of_bulk_refuses_bulk_only() -> None:
    scheduler = filled(BULK, "a", 100_000)
    with pytest.raises(OverloadedError, match="the queue is full"):
        scheduler.check(1000, math.inf, 1.0, BULK, "a")
    scheduler.check(10, 31.0, 1.0, INTERACTIVE, "a")


def test_a_flood_of_queries_refuses_queries_only() -> None:
    scheduler = filled(INTERACTIVE, "a", 50_000)
    with pytest.raises(OverloadedError, match="too long: 50"):
        scheduler.check(10, 600.0, 1.0, INTERACTIVE, "a")
    scheduler.check(1000, 600.0, 1.0, BULK, "a")


@pytest.mark.parametrize("tokens", [50_000, 100_000])  # too long, and full
def test_who_holds_less_than_a_share_is_not_refused_for_what_others_hold(tokens: int) -> None:
    scheduler = filled(INTERACTIVE, "flood", tokens)
    lane = scheduler.lanes[INTERACTIVE]
    with pytest.raises(OverloadedError):
        scheduler.check(100, 600.0, 1.0, INTERACTIVE, "flood")
    for _ in range(10):
        scheduler.check(100, 600.0, 1.0, INTERACTIVE, "other")
        lane.hold("other", 100)
    with pytest.raises(OverloadedError):  # more than half of what there is
        scheduler.check(51_000, 600.0, 1.0, INTERACTIVE, "other")
    with pytest.raises(OverloadedError, match="too close to the deadline"):
        scheduler.check(100, 1.5, 1.0, INTERACTIVE, "other")
    for _ in range(10):
        lane.release("other", 100)
    assert set(lane.held) == {"flood"}


def test_no_lane_takes_a_call_that_it_could_never_hold() -> None:
    scheduler = Scheduler(replace(LIMITS, max_queue_tokens=1000))
    for priority in (INTERACTIVE, BULK):
        with pytest.raises(CallTooLargeError):
            scheduler.check(1001, math.inf, 0.0, priority)


def test_the_spare_worker_is_for_interactive_batches_only() -> None:
    scheduler = Scheduler(SPARE)
    scheduler.add(request(*[128] * 100, priority=BULK))
    assert [scheduler.next_batch(0.0) is not None for _ in range(3)] == [True, True, False]
    assert not scheduler.may_read
    scheduler.add(request(5))
    assert scheduler.may_read
    query = scheduler.next_batch(0.0)
    assert query is not None
    assert (query.priority, query.texts) == (INTERACTIVE, 1)


def test_interactive_batches_alone_do_not_use_the_spare_worker() -> None:
    scheduler = Scheduler(SPARE)
    scheduler.add(request(*[128] * 12))
    assert [scheduler.next_batch(0.0) is not None for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("max_length", [256, 8192])
@pytest.mark.parametrize(("texts", "most"), [(1, 512), (2, 128)])
def test_what_takes_little_of_a_batch_is_interactive(max_length: int, texts: int, most: int) -> None:
    limits = replace(LIMITS, max_length=max_length)
    assert [limits.priority_of(tokens, texts) for tokens in (1, most, most + 1)] == [INTERACTIVE, INTERACTIVE, BULK]


def by_size(limits: Limits, *lengths: int, **options: Any) -> Request:
    return request(*lengths, priority=limits.priority_of(sum(lengths), len(lengths)), **options)


@pytest.mark.parametrize("max_length", [256, 8192])
@pytest.mark.parametrize("lengths", [[28] * 256, [28] * 16, [15] * 32, [8192]])
def test_clients_with_several_texts_do_not_hold_up_queries(max_length: int, lengths: list[int]) -> None:
    limits = replace(SPARE, max_length=max_length)
    clients = 4 * max(4, 256 // len(lengths))
    waiting = [by_size(limits, *lengths, arrival=number / 100) for number in range(clients)]
    queries = [by_size(limits, 12, arrival=0.5 + number / 50) for number in range(25)]
    simulation = Simulation(Scheduler(limits))
    simulation.run(sorted([*waiting, *queries], key=lambda one: one.arrival))
    assert percentile(simulation, queries, 100) <= 2 * BATCH_S


def test_rounds_are_no_longer_than_the_texts_that_wait() -> None:
    def waits(max_length: int) -> float:
        limits = replace(LIMITS, max_length=max_length)
        others = [request(*[28] * 256, arrival=number / 100) for number in range(12)]
        queries = [request(12, arrival=0.5 + number / 10) for number in range(20)]
        simulation = Simulation(Scheduler(limits))
        simulation.run([*others, *queries])
        return percentile(simulation, queries, 100)

    assert waits(8192) == waits(256)


@pytest.mark.parametrize("length", [30, 1000, 8192])
def test_a_query_does_not_wait_for_more_than_one_lone_long_text(length: int) -> None:
    """Without a spare worker, beside clients of a model with a long context."""
    limits = replace(LIMITS, max_length=8192)
    waiting = [by_size(limits, *[length] * (8192 * 4 // length), arrival=number / 100) for number in range(8)]
    queries = [by_size(limits, 12, arrival=0.5 + number / 10) for number in range(20)]
    simulation = Simulation(Scheduler(limits))
    simulation.run([*waiting, *queries])
    assert percentile(simulation, queries, 100) <= (max(512, length) + 16) / SPEED + BATCH_S


@pytest.mark.parametrize("length", [28, 8192])
def test_bulk_gets_a_quarter_of_tokens_whatever_the_length_of_its_texts(length: int) -> None:
    limits = replace(SPARE, max_length=8192)
    flood = [request(28, arrival=number / 2000) for number in range(40_000)]
    bulk = [request(*[length] * (8192 // length), arrival=1.0, priority=BULK) for _ in range(6)]
    simulation = Simulation(Scheduler(limits))
    simulation.run([*flood, *bulk])
    end = max(simulation.finished[each] for each in bulk)
    served = [start for start in simulation.starts if 1.0 <= start.time < end]
    share = sum(start.work.tokens for start in served if start.work.priority == INTERACTIVE)
    assert share == pytest.approx(3 * sum(each.tokens for each in bulk), rel=0.25)


def test_keys_have_equal_shares_also_if_texts_of_one_are_longer_than_a_turn() -> None:
    limits = replace(LIMITS, max_length=8192)
    short = [request(*[20] * 20, arrival=number / 50, key="short") for number in range(1500)]
    long = [request(8192, arrival=number / 4, key="long") for number in range(80)]
    simulation = Simulation(Scheduler(limits))
    simulation.run(sorted([*short, *long], key=lambda one: one.arrival))

    def tokens(requests: list[Request]) -> int:
        return sum(each.tokens for each in requests if 2.0 <= simulation.finished[each] < 20.0)

    assert tokens(long) <= 3 * tokens(short)  # by age it is what was sent, four times as much
