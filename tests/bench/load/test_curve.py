"""Conclusions from measured levels, with made-up figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer.bench.load.curve import compare_servers, load_within, p99_at, recovery_time
from sbert_infer.bench.load.goals import goals
from sbert_infer.bench.load.results import LONE, SATURATION, LoadResults, LoadRow, Turn, summarise


def level(load: float, p99: float, *, server: str = "a", lost: int = 0) -> LoadRow:
    """A level at which 100 requests were sent, `load` a second, and `lost` of them refused."""
    turn = Turn(100 / load, 100, load, latencies_ms=[p99] * (100 - lost), refusals_ms=[1.0] * lost, right=100 - lost)
    return summarise(server, f"{load:g}", [turn])


def closed(server: str, name: str, per_s: int, latency_ms: float) -> LoadRow:
    return summarise(
        server, name, [Turn(1.0, per_s, None, latencies_ms=[latency_ms] * per_s, right=per_s, right_texts=per_s)]
    )


def test_the_load_within_a_bound_lies_between_the_levels_around_it() -> None:
    rows = [level(50, 10), level(100, 10), level(200, 1000)]
    assert load_within(rows, 100) == pytest.approx(150)  # halfway, as 100 is between 10 and 1000 on a logarithmic axis
    assert load_within(rows, 10) == pytest.approx(100)
    assert load_within(rows, 5) == 0
    assert load_within(rows, 5000) == 200
    assert load_within([*rows[:2], level(200, 11, lost=10)], 100) == 100  # fast responses to a few do not count


def test_a_load_that_was_never_handled_does_not_count() -> None:
    """The next level measured may be far beyond the server's saturation."""
    overload = summarise("a", "5x", [Turn(10.0, 1000, 1000.0, [5000.0] * 1000, right=1000)])
    assert load_within([level(90, 10), overload], 4000) == 100


@settings(deadline=None)  # a busy machine must not fail it
@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(0.5, 5000)), min_size=1, max_size=8), st.floats(0.5, 5000))
def test_no_load_beyond_what_was_measured(points: list[tuple[float, float]], bound: float) -> None:
    rows = [level(load, p99) for load, p99 in points]
    found = load_within(rows, bound)
    assert 0 <= found <= max(load for load, _ in points) * (1 + 1e-9)
    assert (found == 0) == all(p99 > bound for _, p99 in points)


def test_p99_at_a_load_between_two_levels() -> None:
    rows = [level(100, 10), level(200, 1000)]
    assert p99_at(rows, 150) == pytest.approx(100)
    assert p99_at(rows, 100) == pytest.approx(10)
    assert p99_at(rows, 99) is None
    assert p99_at(rows, 201) is None


def test_recovery_is_when_responses_stay_fast() -> None:
    slow = [(n / 10, 1.0) for n in range(5)]
    quick = [(0.5 + n / 10, 0.01) for n in range(10)]
    assert recovery_time([*slow, *quick], 0.02) == 0.5
    assert recovery_time(quick, 0.02) == 0
    assert recovery_time([*slow, *quick[:9]], 0.02) is None  # too few to tell
    relapse: list[tuple[float, float | None]] = [*quick[:5], (1.0, None), *((1.1 + n / 10, 0.01) for n in range(10))]
    assert recovery_time([*slow, *relapse], 0.02) == 1.1


def two_servers() -> LoadResults:
    rows = [
        closed("a", LONE, 100, 10.0),
        closed("a", SATURATION, 300, 100.0),
        *(level(load, p99, server="a") for load, p99 in ((60, 10), (100, 12), (200, 20), (280, 80))),
        closed("b", LONE, 50, 20.0),
        closed("b", SATURATION, 100, 200.0),
        *(level(load, p99, server="b") for load, p99 in ((30, 25), (80, 30), (95, 120))),
    ]
    return LoadResults({}, [{"name": "a"}, {"name": "b"}], rows, p99_bound_ms=40.0, offline_rounds=[310.0])


def test_the_first_server_is_compared_with_the_other() -> None:
    (found,) = compare_servers(two_servers())
    assert found.saturation == pytest.approx(3)
    assert found.equal_load_per_s == pytest.approx(70)  # 70 % of the slower one's most
    assert found.p99 is not None
    assert 2 < found.p99 < 3  # some 29 ms against 10.5
    mine, theirs = found.loads_per_s
    assert mine == pytest.approx(240)  # halfway from 20 to 80 ms
    assert theirs is not None
    assert 80 < theirs < 95
    assert found.within_bound == pytest.approx(240 / theirs)


def test_a_server_that_is_never_within_the_bound_is_infinitely_behind() -> None:
    results = two_servers()
    results.p99_bound_ms = 22.0
    assert compare_servers(results)[0].within_bound == math.inf


def test_goals_are_met_or_missed() -> None:
    results = two_servers()
    quick = Turn(1.0, 1500, 1500.0, [50.0] * 280, [5.0] * 1219 + [49.0], right=280, recovery_s=0.5, watched_s=4.0)
    results.rows.append(summarise("a", "5x", [quick]))
    seventy = summarise("a", "70%", [Turn(1.0, 210, 210.0, [39.0] * 210, right=210)])
    results.rows.append(seventy)
    met = {goal.what: goal.met for goal in goals(results, "a")}
    assert met == {
        "most correct responses": None,
        "of the speed without a server": True,
        "p99 of a lone request": None,
        "p99 at 70% load": True,
        "goodput at 5x load": True,
        "slowest refusal": True,
        "recovery": True,
        "wrong vectors": True,
    }
    bad = Turn(1.0, 1500, 1500.0, [50.0] * 260, [50.0], right=260, wrong_texts=1, recovery_s=None, watched_s=4.0)
    results.rows[-2:] = [
        summarise("a", "5x", [quick, bad]),
        summarise("a", "70%", [Turn(1.0, 1, 1.0, [41.0], right=1)]),
    ]
    results.offline_rounds = [400.0]
    met = {goal.what: goal.met for goal in goals(results, "a")}
    missed = {what for what, verdict in met.items() if verdict is False}
    assert missed == {
        "of the speed without a server",
        "p99 at 70% load",
        "slowest refusal",
        "recovery",
        "wrong vectors",
    }


def test_goals_are_judged_by_the_median_round() -> None:
    """A machine that is slow in one round slows down everything compared in it."""
    speeds, load_p99, alone_p99 = (1.0, 0.5, 1.0), (30.0, 90.0, 50.0), (10.0, 20.0, 10.0)
    rows = [
        summarise("a", LONE, [Turn(1.0, 9, None, [p99] * 9) for p99 in alone_p99]),
        summarise("a", SATURATION, [Turn(1.0, 0, None, right=int(100 * n), right_texts=int(100 * n)) for n in speeds]),
        summarise("a", "70%", [Turn(1.0, 9, 9.0, [p99] * 9, right=9) for p99 in load_p99]),
        summarise("a", "5x", [Turn(1.0, 0, 500.0, right=right, watched_s=1.0) for right in (80, 47, 91)]),
    ]
    results = LoadResults({}, [{"name": "a"}], rows, offline_rounds=[100.0, 55.0, 104.0])
    found = {goal.what: (goal.value, goal.met) for goal in goals(results, "a")}
    assert found["of the speed without a server"] == ("96% (91% to 100%)", True)
    assert found["p99 at 70% load"] == ("90.0 ms, 4.5x the lone one (3.0x to 5.0x)", False)
    assert found["goodput at 5x load"] == ("91% of the most (80% to 94%)", True)


def test_a_server_that_gets_nothing_right_misses_its_goal() -> None:
    nothing = [
        summarise("a", SATURATION, [Turn(1.0, 9, None, [5.0] * 9)]),
        summarise("a", "5x", [Turn(1.0, 50, 50.0, [5.0] * 9, watched_s=1.0)]),
    ]
    found = {goal.what: goal for goal in goals(LoadResults({}, [{"name": "a"}], nothing), "a")}
    assert (found["goodput at 5x load"].value, found["goodput at 5x load"].met) == ("0% of the most", False)


def test_rounds_are_pooled_not_averaged() -> None:
    turns = [
        Turn(1.0, 99, 99.0, [1.0] * 99, right=99, right_texts=99, memory_mb=10.0),
        Turn(3.0, 1, 1.0, [500.0], right=0, wrong_texts=1, memory_mb=30.0),
    ]
    row = summarise("a", "10%", turns)
    assert row.latency_ms["max"] == 500
    assert row.latency_ms["p50"] == 1
    assert row.answered_per_s == 25
    assert row.goodput_per_s == 24.75
    assert row.goodput_rounds == [99, 0]
    assert (row.wrong_texts, row.memory_mb, row.refusal_ms) == (1, 30, {})


def test_responses_to_recovery_probes_are_goodput() -> None:
    row = summarise("a", "5x", [Turn(2.0, 500, 250.0, [9.0] * 100, right=100, right_beside=20)])
    assert (row.goodput_per_s, row.goodput_rounds) == (60.0, [60.0])
    assert (row.answered_per_s, row.right) == (50.0, 100)
