"""Buckets that hold every text, within the budget."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.artifact.profiles import make_profiles
from sbert_infer.text.batching import cut_batches

LONGEST = st.integers(1, 700)
BUDGETS = st.integers(1, 20_000)  # tokens
COUNTS = st.integers(1, 8)
LENGTHS = st.none() | st.lists(st.integers(0, 900), max_size=200)


@given(LENGTHS, LONGEST, BUDGETS, COUNTS)
def test_profiles_cover_every_length_within_the_budget(
    lengths: list[int] | None, longest: int, budget: int, count: int
) -> None:
    profiles = make_profiles(None if lengths is None else np.array(lengths, np.int64), longest, budget, count)
    edges = [profile.length for profile in profiles]
    assert edges == sorted(set(edges))
    assert edges[-1] == longest
    assert len(edges) <= count
    assert all(edge % 8 == 0 for edge in edges[:-1])
    for profile in profiles:
        assert 1 <= profile.best_batch <= profile.max_batch
        assert profile.max_batch == 1 or profile.max_batch * profile.length <= budget
        assert (profile.max_batch + 1) * profile.length > budget


@given(st.lists(st.integers(1, 512), min_size=1, max_size=100), BUDGETS, COUNTS)
def test_what_the_planner_makes_fits_the_profiles(lengths: list[int], budget: int, count: int) -> None:
    profiles = {p.length: p for p in make_profiles(np.array(lengths), 512, budget, count)}
    for batch in cut_batches(np.array(lengths), budget, edges=list(profiles)):
        assert len(batch.rows) <= profiles[batch.length].max_batch


@given(LENGTHS, LONGEST, BUDGETS, COUNTS)
def test_batch_sizes_are_few_and_never_double_the_work(
    lengths: list[int] | None, longest: int, budget: int, count: int
) -> None:
    for profile in make_profiles(None if lengths is None else np.array(lengths, np.int64), longest, budget, count):
        sizes = profile.batches
        assert sizes == tuple(sorted(set(sizes)))
        assert sizes[0] == 1
        assert sizes[-1] == profile.max_batch
        assert all(larger <= 2 * smaller for smaller, larger in pairwise(sizes))
        assert len(sizes) <= profile.max_batch.bit_length() + 1


def test_the_users_lengths_decide() -> None:
    short = make_profiles(np.full(1000, 20), 512, 8192)
    assert [profile.length for profile in short] == [24, 512]


def test_without_lengths_each_bucket_wastes_a_like_share() -> None:
    edges = [profile.length for profile in make_profiles(None, 512, 8192)]
    ratios = np.array(edges[1:]) / np.array(edges[:-1])
    assert len(edges) == 6
    assert ratios.max() < 1.25 * ratios.min()


@pytest.mark.parametrize("budget", [0, -5])
def test_no_budget(budget: int) -> None:
    with pytest.raises(ValueError, match=f"max_batch_tokens must be at least 1, got {budget}"):
        make_profiles(None, 512, budget)
