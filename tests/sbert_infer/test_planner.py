"""Every text in exactly one batch, within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.planner import plan_batches

LENGTHS = st.lists(st.integers(1, 512), max_size=200)
BUDGETS = st.integers(1, 4096)  # tokens
CAPS = st.none() | st.integers(1, 40)  # texts


@given(LENGTHS, BUDGETS, CAPS)
def test_each_text_runs_once_within_the_budget(lengths: list[int], budget: int, cap: int | None) -> None:
    batches = plan_batches(np.array(lengths, np.int64), budget, cap)
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(len(lengths)))
    for batch in batches:
        count = len(batch.rows)
        assert 1 <= count <= (cap or count)
        assert batch.length >= max(lengths[row] for row in batch.rows)
        assert count == 1 or count * batch.length <= budget


@given(LENGTHS, BUDGETS, CAPS)
def test_texts_of_like_length_run_together(lengths: list[int], budget: int, cap: int | None) -> None:
    batches = plan_batches(np.array(lengths, np.int64), budget, cap)
    order = [lengths[row] for batch in batches for row in batch.rows]
    assert order == sorted(lengths, reverse=True)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(64, 1024))
def test_texts_of_one_length_fill_the_budget(count: int, length: int, budget: int) -> None:
    batches = plan_batches(np.full(count, length), budget)
    assert len(batches) == -(-count // (budget // length))
    assert all(batch.length == length for batch in batches)


def test_nothing_to_plan() -> None:
    assert plan_batches(np.array([], np.int64), 512) == []


@pytest.mark.parametrize("texts", [1, 2, 1000])
def test_a_text_over_the_budget_runs_alone(texts: int) -> None:
    batches = plan_batches(np.full(texts, 600), 512)
    assert [len(batch.rows) for batch in batches] == [1] * texts
