"""Simulated time: who uses what, and when."""

from __future__ import annotations

import pytest

from sbert_infer.bench.gpu_model.events import Actor, Events, Flag, Interval, Resource, Use


def test_whoever_comes_first_goes_first() -> None:
    events, machine = Events(), Resource("machine")

    def actor(name: str, seconds: float) -> Actor:
        yield Use(machine, seconds, name)
        yield Use(machine, seconds, name)

    events.start(actor("a", 2))
    events.start(actor("b", 3), at=1)
    assert events.run() == 10
    assert machine.intervals == [Interval(0, 2, "a"), Interval(2, 5, "b"), Interval(5, 7, "a"), Interval(7, 10, "b")]
    assert machine.busy_s == 10


def test_a_lock_with_turns_is_given_up_when_others_have_waited() -> None:
    """Python's thread switch: whoever waits asks for the lock after an interval, not at once."""
    events, lock = Events(), Resource("lock", turn_s=5)

    def actor(name: str, seconds: float) -> Actor:
        yield Use(lock, seconds, name)

    events.start(actor("long", 20))
    events.start(actor("short", 1), at=2)
    assert events.run() == 21
    assert lock.intervals == [Interval(0, 7, "long"), Interval(7, 8, "short"), Interval(8, 21, "long")]


def test_two_that_hold_a_lock_for_long_take_turns() -> None:
    events, lock = Events(), Resource("lock", turn_s=5)

    def actor(name: str) -> Actor:
        yield Use(lock, 12, name)

    events.start(actor("a"))
    events.start(actor("b"))
    assert events.run() == 24
    assert [(interval.what, interval.end) for interval in lock.intervals] == [
        *[("a", 5), ("b", 10), ("a", 15), ("b", 20), ("a", 22), ("b", 24)]
    ]


def test_a_lock_is_kept_from_one_use_to_the_next() -> None:
    """But no longer than its turn: the interval counts from when the other came to wait."""
    events, lock, machine = Events(), Resource("lock", turn_s=5), Resource("machine")

    def keeping() -> Actor:
        yield Use(lock, 2, "first")
        yield Use(lock, 2, "second")
        yield Use(machine, 10, "machine")
        yield Use(lock, 4, "third")
        yield Use(lock, 4, "fourth")

    def waiting(seconds: float) -> Actor:
        yield Use(lock, seconds, "other")

    events.start(keeping())
    events.start(waiting(1), at=1)
    events.start(waiting(1), at=15)
    events.run()
    assert [(use.what, use.start, use.end) for use in lock.intervals] == [
        *[("first", 0, 2), ("second", 2, 4), ("other", 4, 5)],
        *[("third", 14, 18), ("fourth", 18, 20), ("other", 20, 21), ("fourth", 21, 23)],
    ]


@pytest.mark.parametrize("raised_at", [0, 3])
def test_a_flag_is_waited_for_however_early_it_was_raised(raised_at: int) -> None:
    events, machine, flag = Events(), Resource("machine"), Flag()

    def waiting() -> Actor:
        yield Use(machine, 1, "before")
        yield flag
        yield Use(machine, 1, "after")

    def raising() -> Actor:
        events.lift(flag)
        yield from ()

    events.start(waiting())
    events.start(raising(), at=raised_at)
    assert events.run() == max(1, raised_at) + 1
