"""Packed rows hold every text once, unbroken, within the limits, and waste little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.text.packing import PackedRows, pack_rows, row_cost, segments_of
from sbert_infer.text.shapes import choose_shapes
from sbert_infer.types import Shape

Lengths = npt.NDArray[np.int64]

# Row lengths, each with its numbers of rows and the most texts in a row.
SHAPES = st.dictionaries(
    st.integers(1, 64),
    st.tuples(st.sets(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 20)),
    min_size=1,
    max_size=4,
).map(lambda found: [Shape(rows, length, most) for length, (counts, most) in found.items() for rows in counts])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Shape], Lengths]:
    """Draw shapes, and texts that fit into them."""
    shapes = draw(SHAPES)
    longest = max(shape.length for shape in shapes)
    lengths = draw(st.lists(st.integers(1, longest), max_size=120))
    return shapes, np.array(lengths, np.int64)


@given(cases(), st.none() | st.integers(1, 300), st.none() | st.integers(1, 12))
def test_each_text_stands_once_in_a_row(
    case: tuple[list[Shape], Lengths], budget: int | None, most_texts: int | None
) -> None:
    shapes, lengths = case
    batches = pack_rows(lengths, shapes, hidden=64, max_batch_tokens=budget, max_batch_texts=most_texts)
    assert sorted(text for batch in batches for text in batch.texts.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert batch.shape in shapes
        check_rows(batch, lengths)
        smallest = min(shape.rows for shape in shapes if shape.length == batch.shape.length)
        if budget is not None:
            assert batch.tokens <= budget or batch.shape.rows == smallest
        if most_texts is not None:
            assert len(batch.texts) <= most_texts or batch.shape.rows == smallest


def check_rows(batch: PackedRows, lengths: Lengths) -> None:
    """Texts are unbroken, one after another, and no row has too many."""
    shape = batch.shape
    taken = np.zeros((shape.rows, shape.length), np.int64)
    for text, row, column in zip(batch.texts, batch.rows, batch.columns, strict=True):
        assert column + lengths[text] <= shape.length
        taken[row, column : column + lengths[text]] += 1
    assert taken.max() == 1
    for row in range(shape.rows):
        numbers = batch.segments[batch.rows == row]
        assert len(numbers) <= shape.segments
        assert numbers.tolist() == list(range(len(numbers)))
        assert (np.diff(taken[row]) <= 0).all()  # no gap before the end


def test_no_texts_and_empty_texts() -> None:
    assert pack_rows(np.array([], np.int64), [Shape(1, 8, 2)], 64) == []
    (batch,) = pack_rows(np.array([0, 0]), [Shape(1, 8, 2)], 64)
    assert batch.columns.tolist() == [0, 1]


def test_a_text_longer_than_every_row() -> None:
    with pytest.raises(ValueError, match="a text of 9 tokens is longer than the longest row, 8"):
        pack_rows(np.array([3, 9]), [Shape(1, 4, 2), Shape(1, 8, 2)], 64)


def test_a_lone_text_runs_in_the_smallest_shape() -> None:
    shapes = choose_shapes(None, 512, hidden=384, max_batch_tokens=16384)
    (batch,) = pack_rows(np.array([12]), shapes, 384)
    assert batch.shape == Shape(1, 64, 16)


# --------------------------------------------------------------------------------------------------
# Work

# Lengths as they occur: sentences with a tail of paragraphs; questions; paragraphs; all alike.
MIXES: dict[str, Callable[[np.random.Generator, int], npt.NDArray[Any]]] = {
    "sentences": lambda random, count: random.lognormal(3.5, 0.9, count),
    "questions": lambda random, count: 3.0 + random.poisson(8, count),
    "paragraphs": lambda random, count: random.normal(400, 100, count),
    "any": lambda random, count: random.uniform(3, 512, count),
    "alike": lambda random, count: np.full(count, 300.0),
}


def draw_lengths(mix: str, count: int, longest: int = 512) -> Lengths:
    lengths = MIXES[mix](np.random.default_rng(0), count)
    rounded: Lengths = np.clip(lengths.round(), 3, longest).astype(np.int64)
    return rounded


def work(batches: list[PackedRows], hidden: int) -> float:
    return sum(batch.shape.rows * row_cost(batch.shape.length, hidden) for batch in batches)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("hidden", "bound"), [(384, 1.12), (768, 1.08)])
def test_work_is_close_to_the_least(mix: str, hidden: int, bound: float) -> None:
    """All that runs is counted: attention over whole rows, gaps, and rows without a text."""
    lengths = draw_lengths(mix, 4096)
    batches = pack_rows(lengths, choose_shapes(lengths, 512, hidden, 16384), hidden)
    least = sum(row_cost(length, hidden) for length in lengths.tolist())
    assert work(batches, hidden) < bound * least


@pytest.mark.parametrize("longest", [128, 256, 384, 512])
def test_sentences_fill_the_rows(longest: int) -> None:
    lengths = draw_lengths("sentences", 4096, longest)
    shapes = choose_shapes(None, longest, 384, 16384)
    batches = pack_rows(lengths, shapes, 384)
    assert lengths.sum() > 0.98 * sum(batch.tokens for batch in batches)


def test_few_texts_fill_the_rows() -> None:
    shapes = choose_shapes(None, 512, 384, 16384)
    tokens = run = 0
    for lengths in np.split(draw_lengths("sentences", 64 * 50), 50):
        tokens += lengths.sum()
        run += sum(batch.tokens for batch in pack_rows(lengths, shapes, 384))
    assert tokens > 0.95 * run


# --------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize("mix", [None, *MIXES])
@pytest.mark.parametrize("longest", [64, 250, 512, 8192])
def test_shapes_are_few_and_hold_every_text(mix: str | None, longest: int) -> None:
    lengths = None if mix is None else draw_lengths(mix, 2000, longest)
    shapes = choose_shapes(lengths, longest, hidden=384, max_batch_tokens=16384)
    assert len(set(shapes)) == len(shapes) <= (12 if mix is None else 20)
    assert max(shape.segments for shape in shapes) <= 128
    row_lengths = sorted({shape.length for shape in shapes})
    assert row_lengths[-1] == -(-longest // 8) * 8
    assert all(length % 8 == 0 for length in row_lengths)
    assert all(shape.tokens <= 16384 and shape.segments == segments_of(shape.length) for shape in shapes)
    for length in row_lengths:
        assert min(shape.rows for shape in shapes if shape.length == length) == 1
    assert Shape(1, row_lengths[0], segments_of(row_lengths[0])) in shapes
    assert row_lengths[0] <= 64


def test_longer_rows_where_attention_is_a_smaller_share() -> None:
    lengths = draw_lengths("questions", 2000)
    narrow, wide = (choose_shapes(lengths, 512, hidden, 16384) for hidden in (128, 4096))
    assert min(s.length for s in narrow if s.rows > 1) < min(s.length for s in wide if s.rows > 1)


def test_a_text_in_each_row_if_they_can_not_be_packed() -> None:
    shapes = choose_shapes(None, 512, hidden=384, max_batch_tokens=4096, packed=False)
    assert {shape.segments for shape in shapes} == {1}
    assert len({shape.length for shape in shapes}) == 4
    lengths = draw_lengths("sentences", 500)
    batches = pack_rows(lengths, shapes, 384)
    assert all(len(set(batch.rows.tolist())) == len(batch.texts) for batch in batches)


def test_a_budget_below_the_longest_text() -> None:
    shapes = choose_shapes(None, 512, hidden=384, max_batch_tokens=100)
    assert {shape.rows for shape in shapes if shape.length == 512} == {1}
    with pytest.raises(ValueError, match="max_batch_tokens must be at least 1, got 0"):
        choose_shapes(None, 512, hidden=384, max_batch_tokens=0)
