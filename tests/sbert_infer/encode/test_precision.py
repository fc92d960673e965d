"""Reduced precision equals that of sentence-transformers bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.util import quantize_embeddings

from sbert_infer import SbertInferWarning
from sbert_infer.encode.precision import reduce_precision


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(100, 130), dim=st.integers(1, 40))
@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_equal_bits(precision: Any, seed: int, count: int, dim: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    vectors[:, 0] = 0.5  # a dimension without a range
    found, expected = reduce_precision(vectors, precision), quantize_embeddings(vectors, precision)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_float32_is_left_alone() -> None:
    vectors = np.ones((2, 3), np.float32)
    assert reduce_precision(vectors, "float32") is vectors


def test_few_vectors() -> None:
    vectors = np.eye(3, dtype=np.float32)
    with pytest.raises(ValueError, match="precision='uint8' needs several texts"):
        reduce_precision(vectors[:1], "uint8")
    with pytest.warns(SbertInferWarning, match="only 3 embeddings"):
        reduce_precision(vectors, "uint8")
