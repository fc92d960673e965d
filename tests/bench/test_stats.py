"""The arithmetic, against scipy and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.bench.inside.checkpoint_facts import flops_polynomial
from sbert_infer.bench.report.svg_parts import nice_ticks
from sbert_infer.bench.stats import cosines, flops, paired_ratio, percentiles, spearman

scipy_stats = pytest.importorskip("scipy.stats")  # here, since a first import takes longer than an example may


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=40))
def test_spearman_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    left, right = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert spearman(left, right) == 0
    else:
        assert spearman(left, right) == pytest.approx(scipy_stats.spearmanr(left, right).statistic)


def test_the_ratio_is_taken_round_by_round() -> None:
    assert paired_ratio([1.0, 10.0, 1.0], [0.5, 5.0, 0.25]) == 2  # a slow spell in round 2 hits both alike


def test_percentiles() -> None:
    assert percentiles(list(range(101))) == {"p50": 50, "p95": 95, "p99": 99}


def test_cosines_of_equal_opposite_zero_and_broken_rows() -> None:
    reference = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], np.float32)
    vectors = np.array([[2.0, 4.0], [-1.0, -2.0], [0.0, 0.0], [np.nan, 1.0]], np.float32)
    found = cosines(vectors, reference)
    assert found[:3] == pytest.approx([1, -1, 0])
    assert np.isnan(found[3])


@given(st.floats(1e-6, 1e9), st.floats(0, 0.99))
def test_ticks_enclose_the_range_and_are_few(high: float, share: float) -> None:
    ticks = nice_ticks(high, share * high)
    assert ticks[0] <= share * high * (1 + 1e-6)
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 8


def test_flops_of_bert_are_those_counted_by_hand(make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint("bert")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    constant, linear, square = flops_polynomial({"checkpoint": str(folder), "pairs": False})
    # Per token and layer: Q, K, V and the output are width x width each, the feed-forward is width
    # x inner twice.
    assert linear == pytest.approx(layers * 2 * (4 * width**2 + 2 * width * inner), rel=1e-6)
    # Per pair of tokens and layer: the scores and the weighted sum take width multiplications each.
    assert square == pytest.approx(layers * 2 * 2 * width, rel=1e-6)
    assert constant == pytest.approx(2 * width**2, rel=0.01, abs=1)  # BERT's own pooler
    assert flops(np.array([3, 5]), (1, 10, 100)) == 2 + 80 + 3400
