"""Vectors as JSON numbers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sbert_infer.serve.wire.responses import as_numbers, json_array

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(arrays.arrays(np.float32, (2, 3), elements=finite))
def test_numbers_are_the_same_float32_after_a_journey_through_json(vectors: Any) -> None:
    found = np.array(json.loads(json.dumps(as_numbers(vectors))), np.float64).astype(np.float32)
    np.testing.assert_array_equal(found, vectors)


@given(st.floats(2**-20, 1, width=32))
def test_numbers_have_no_more_digits_than_they_need(value: float) -> None:
    ((text,),) = [[repr(number) for number in row] for row in as_numbers(np.array([[value]], np.float32))]
    assert len(text.split("e")[0].replace(".", "").lstrip("0")) <= 9


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_leaves(bad: float) -> None:
    vectors = np.zeros((100, 8), np.float32)
    vectors[99, 7] = bad
    with pytest.raises(ArithmeticError):
        asyncio.run(json_array(vectors, lambda start, rows: list(as_numbers(rows))))


@given(st.integers(1, 300), st.integers(1, 900))
def test_pieces_make_one_array(rows: int, dim: int) -> None:
    vectors = np.arange(rows * dim, dtype=np.float32).reshape(rows, dim)
    raw = asyncio.run(json_array(vectors, lambda start, rows: [[start, len(rows)]]))
    starts = json.loads(bytes(raw))
    assert [start for start, _ in starts] == list(np.cumsum([0, *(count for _, count in starts)])[:-1])
    assert sum(count for _, count in starts) == rows
