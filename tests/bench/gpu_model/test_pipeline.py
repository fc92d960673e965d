"""The simulated pipeline against closed forms, and rules that hold for any costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.bench.gpu_model.pipeline import BatchCosts, WindowCosts, simulate

BATCH = BatchCosts(make_s=1, copy_in_s=2, run_s=10, copy_out_s=3, take_s=2)
WINDOW = WindowCosts(tokenize_s=7, collect_s=1, plan_s=2, gather_s=1, batches=(BATCH,) * 6)
BEFORE = WINDOW.tokenize_s + WINDOW.collect_s + WINDOW.plan_s
PYTHON = BATCH.make_s + BATCH.take_s
ON_GPU = BATCH.copy_in_s + BATCH.run_s + BATCH.copy_out_s


def test_one_slot_takes_the_sum_of_all_parts() -> None:
    trace = simulate([WINDOW], slots=1)
    assert trace.seconds == BEFORE + 6 * (PYTHON + ON_GPU) + WINDOW.gather_s


def test_two_slots_hide_all_but_the_gpu() -> None:
    """The other parts of a batch take less than the run of the other slot's batch."""
    trace = simulate([WINDOW], slots=2, switch_interval_s=100)
    assert trace.seconds == BEFORE + 6 * BATCH.run_s + (PYTHON + ON_GPU - BATCH.run_s) + WINDOW.gather_s
    assert trace.busy("gpu") == 1


def test_two_slots_hide_the_gpu_if_python_takes_longer() -> None:
    slow = replace(BATCH, make_s=20, take_s=20)
    trace = simulate([replace(WINDOW, batches=(slow,) * 6)], slots=2, switch_interval_s=100)
    assert trace.seconds == BEFORE + 6 * (slow.make_s + slow.take_s) + WINDOW.gather_s


def test_the_next_window_is_tokenized_while_this_one_runs() -> None:
    """What takes longer counts: here the GPU, so tokenizing is hidden but for the first window."""
    trace = simulate([WINDOW] * 10, switch_interval_s=100)
    assert trace.busy("gpu") > 0.97
    slow = replace(WINDOW, tokenize_s=100)
    trace = simulate([slow] * 10, switch_interval_s=100)
    assert trace.busy("tokenizer") > 0.95
    assert trace.busy("gpu") == pytest.approx(60 / 103, rel=0.1)


def test_workers_wait_for_python_while_ids_are_collected() -> None:
    """The calling thread gives up the lock once in a switch interval, or after each piece."""
    window = replace(WINDOW, tokenize_s=10, collect_s=40)
    whole = simulate([window] * 10, switch_interval_s=20).busy("gpu")
    assert simulate([window] * 10, switch_interval_s=5).busy("gpu") > whole + 0.05
    assert simulate([replace(window, pieces=20)] * 10, switch_interval_s=20).busy("gpu") > whole + 0.05


SECONDS = st.floats(0, 1e3, allow_subnormal=False).map(lambda seconds: round(seconds, 2))
BATCHES = st.builds(BatchCosts, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
WINDOWS = st.builds(
    WindowCosts, SECONDS, SECONDS, SECONDS, SECONDS, st.lists(BATCHES, max_size=5).map(tuple), st.integers(1, 3)
)


@given(st.lists(WINDOWS, max_size=4), st.integers(1, 4), st.integers(1, 2), st.sampled_from([0.5, 100.0]))
def test_rules_of_every_run(windows: list[WindowCosts], slots: int, ahead: int, interval: float) -> None:
    trace = simulate(windows, slots=slots, windows_ahead=ahead, switch_interval_s=interval)
    batches = {f"batch {at}.{n}": batch for at, w in enumerate(windows) for n, batch in enumerate(w.batches)}
    totals = {
        "tokenizer": sum(window.tokenize_s for window in windows),
        "python": sum(w.collect_s + w.plan_s + w.gather_s for w in windows)
        + sum(batch.make_s + batch.take_s for batch in batches.values()),
        "copy in": sum(batch.copy_in_s for batch in batches.values()),
        "gpu": sum(batch.run_s for batch in batches.values()),
        "copy out": sum(batch.copy_out_s for batch in batches.values()),
    }
    for name, total in totals.items():
        assert all(one.end <= next_.start for one, next_ in pairwise(trace.uses(name))), f"{name} does two things"
        assert trace.resources[name].busy_s == pytest.approx(total, abs=1e-6), f"{name} does all of its work"
        assert trace.seconds >= total - 1e-6
    assert trace.seconds <= sum(totals.values()) + 1e-6, "something is always in use"
    for batch in batches:
        stages = [use for name in ("copy in", "gpu", "copy out") for use in trace.uses(name) if use.what == batch]
        assert all(one.end <= next_.start for one, next_ in pairwise(stages)), "stages are in order"
    again = simulate(windows, slots=slots, windows_ahead=ahead, switch_interval_s=interval)
    assert again.seconds == trace.seconds


def test_no_more_batches_are_under_way_than_slots() -> None:
    trace = simulate([WINDOW], slots=2, switch_interval_s=100)
    starts = [use.start for use in trace.uses("copy in")]
    ends = [use.end for use in trace.uses("copy out")]
    assert all(start >= end for start, end in zip(starts[2:], ends, strict=False))
