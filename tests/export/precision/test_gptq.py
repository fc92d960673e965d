"""Rounding with correction: closer products, and never beyond the range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.export.precision.gptq import correction, round_rows


def correlated(seed: int, rows: int, width: int) -> np.ndarray:
    """Activations with correlated channels, as in a model."""
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, width)) @ random.normal(size=(width, width))


@pytest.mark.parametrize("width", [30, 128, 300])  # less than, just, and more than a block
def test_products_come_closer(width: int) -> None:
    x, fresh = np.split(correlated(0, 4 * width, width), 2)
    weight = np.random.default_rng(1).normal(size=(width, 5))
    steps = np.abs(weight).max(axis=0) / 15
    corrected = round_rows(weight, steps, 15, correction(x.T @ x)) * steps
    plain = np.rint(weight / steps) * steps
    error, plain_error = (np.square(fresh @ (rounded - weight)).mean() for rounded in (corrected, plain))
    assert error < 0.8 * plain_error


def test_independent_inputs_round_to_the_nearest() -> None:
    weight = np.random.default_rng(0).normal(size=(20, 3))
    steps = np.abs(weight).max(axis=0) / 63
    np.testing.assert_array_equal(round_rows(weight, steps, 63, correction(np.eye(20))), np.rint(weight / steps))


@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 63))
def test_never_beyond_the_range(seed: int, width: int, largest: int) -> None:
    x = correlated(seed, 2, width)  # fewer tokens than channels: the moments are singular
    weight = np.random.default_rng(seed).normal(size=(width, 4)) * 100
    integers = round_rows(weight, np.abs(weight).max(axis=0) / largest, largest, correction(x.T @ x))
    assert np.abs(integers.astype(int)).max() <= largest


def test_no_activations_at_all() -> None:
    weight = np.ones((4, 2))
    np.testing.assert_array_equal(round_rows(weight, np.full(2, 0.5), 63, correction(np.zeros((4, 4)))), 2 * weight)
