"""The arithmetic, against scipy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.bench.stats import cosines, flops, paired_ratio, percentiles, spearman

scipy_stats = pytest.importorskip("scipy.stats")  # imported here: a first import takes longer than an example may


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=40))
def test_spearman_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    left, right = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert spearman(left, right) == 0
    else:
        assert spearman(left, right) == pytest.approx(scipy_stats.spearmanr(left, right).statistic)


def test_the_ratio_is_taken_round_by_round() -> None:
    assert paired_ratio([1.0, 10.0, 1.0], [0.5, 5.0, 0.25]) == 2  # a slow spell in round 2 affects both


def test_percentiles() -> None:
    assert percentiles(list(range(101))) == {"p50": 50, "p95": 95, "p99": 99}


def test_cosines_of_equal_opposite_zero_and_broken_rows() -> None:
    reference = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], np.float32)
    vectors = np.array([[2.0, 4.0], [-1.0, -2.0], [0.0, 0.0], [np.nan, 1.0]], np.float32)
    found = cosines(vectors, reference)
    assert found[:3] == pytest.approx([1, -1, 0])
    assert np.isnan(found[3])


def test_flops_are_summed_over_the_lengths() -> None:
    assert flops(np.array([3, 5]), (1, 10, 100)) == 2 + 80 + 3400
