"""Batching puts every text into exactly one batch, within the budget."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.text.batching import bucket_edges, cut_batches, cut_in_order

LENGTHS = st.lists(st.integers(1, 512), max_size=200)
BUDGETS = st.integers(1, 4096)  # tokens
CAPS = st.none() | st.integers(1, 40)  # texts


@given(LENGTHS, BUDGETS, CAPS)
def test_each_text_runs_once_within_the_budget(lengths: list[int], budget: int, cap: int | None) -> None:
    batches = cut_batches(np.array(lengths, np.int64), budget, cap)
    assert sorted(row for batch in batches for row in batch.texts.tolist()) == list(range(len(lengths)))
    for batch in batches:
        count = len(batch.texts)
        assert 1 <= count <= (cap or count)
        assert batch.length >= max(lengths[row] for row in batch.texts)
        assert count == 1 or count * batch.length <= budget


@given(LENGTHS, BUDGETS, st.sampled_from([1, 8, 64]), st.integers(500, 520))
def test_lengths_are_rounded_up_to_the_limit(lengths: list[int], budget: int, multiple: int, longest: int) -> None:
    for batch in cut_batches(np.array(lengths, np.int64), budget, None, multiple, longest):
        own = max(lengths[text] for text in batch.texts)
        assert own <= batch.length < own + multiple
        assert batch.length % multiple == 0 or batch.length == max(own, longest)
        assert len(batch.texts) == 1 or batch.tokens <= budget


@given(LENGTHS, BUDGETS, CAPS)
def test_texts_of_like_length_run_together(lengths: list[int], budget: int, cap: int | None) -> None:
    batches = cut_batches(np.array(lengths, np.int64), budget, cap)
    order = [lengths[row] for batch in batches for row in batch.texts]
    assert order == sorted(lengths, reverse=True)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(64, 1024))
def test_texts_of_one_length_fill_the_budget(count: int, length: int, budget: int) -> None:
    batches = cut_batches(np.full(count, length), budget)
    assert len(batches) == -(-count // (budget // length))
    assert all(batch.length == length for batch in batches)


def test_nothing_to_plan() -> None:
    assert cut_batches(np.array([], np.int64), 512) == []


@pytest.mark.parametrize("texts", [1, 2, 1000])
def test_a_text_over_the_budget_runs_alone(texts: int) -> None:
    batches = cut_batches(np.full(texts, 600), 512)
    assert [len(batch.texts) for batch in batches] == [1] * texts


def test_a_text_without_tokens_still_runs() -> None:
    (batch,) = cut_batches(np.array([0, 0]), 512)
    assert batch.length == 1
    assert batch.texts.tolist() == [0, 1]


@given(LENGTHS, BUDGETS, CAPS)
def test_in_order_each_group_is_as_large_as_it_may_be(lengths: list[int], budget: int, cap: int | None) -> None:
    groups = cut_in_order(np.array(lengths, np.int64), budget, cap)
    assert [text for group in groups for text in group.tolist()] == list(range(len(lengths)))
    for group in groups:
        tokens, texts, last = sum(lengths[text] for text in group), len(group), int(group[-1])
        assert texts == 1 or (tokens <= budget and texts <= (cap or texts))
        if last + 1 < len(lengths):
            assert texts == cap or tokens + lengths[last + 1] > budget


# --------------------------------------------------------------------------------------------------
# Buckets


def padded_tokens(lengths: list[int], edges: list[int]) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


@given(st.integers(3, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), min_size=1))), CAPS)
def test_edges_are_the_best_there_are(given_lengths: tuple[int, list[int]], count: int | None) -> None:
    longest, lengths = given_lengths
    count = min(count or 1, 4)
    edges = bucket_edges(np.array(lengths), count, longest)
    assert edges == sorted(set(edges))
    assert edges[-1] == longest
    assert len(edges) <= count
    every_choice = (c for size in range(count) for c in combinations(range(1, longest), size))
    assert padded_tokens(lengths, edges) == min(padded_tokens(lengths, [*c, longest]) for c in every_choice)


@given(LENGTHS, st.integers(1, 8), st.sampled_from([1, 8, 16, 100]))
def test_edges_are_multiples_up_to_the_last(lengths: list[int], count: int, multiple: int) -> None:
    edges = bucket_edges(np.array(lengths, np.int64), count, 512, multiple)
    assert edges[-1] == 512
    assert all(edge % multiple == 0 for edge in edges[:-1])


@pytest.mark.parametrize(("lengths", "count"), [([5], 0), ([0, 5], 3), ([5, 600], 3)])
def test_edges_that_can_not_be(lengths: list[int], count: int) -> None:
    with pytest.raises(ValueError, match="lengths between 1 and 512"):
        bucket_edges(np.array(lengths), count, 512)
