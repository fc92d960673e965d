"""Vectors in fewer bits: what each type keeps, and that no vector depends on another."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.util.quantization import quantize_embeddings

from sbert_infer.serve.wire.schemas import VectorType
from sbert_infer.serve.wire.vectors import convert, eight_bit_range, rows_of

FLOATS = st.floats(-1, 1, width=32)
TYPES: tuple[VectorType, ...] = ("float", "int8", "uint8", "binary", "ubinary")


def unit_vectors(count: int, dim: int) -> Any:
    vectors = np.random.default_rng(count * dim).standard_normal((count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("dim", [8, 32, 384, 1024])
def test_products_of_bytes_are_those_of_the_vectors(dim: int) -> None:
    vectors = unit_vectors(50, dim)
    scale = eight_bit_range(dim) / 127
    signed = convert(vectors, "int8").astype(np.float64)
    np.testing.assert_allclose(signed @ signed.T * scale**2, vectors @ vectors.T, atol=0.02)
    np.testing.assert_array_equal(convert(vectors, "uint8"), signed + 128)


@pytest.mark.parametrize("kind", ["binary", "ubinary"])
def test_bits_are_those_of_sentence_transformers(kind: VectorType) -> None:
    vectors = unit_vectors(5, 40)
    np.testing.assert_array_equal(convert(vectors, kind), quantize_embeddings(vectors, precision=kind))


@given(arrays.arrays(np.float32, (3, 16), elements=FLOATS), st.sampled_from(TYPES))
@settings(max_examples=50, deadline=None)
def test_a_vector_is_the_same_alone_and_packed(vectors: Any, kind: VectorType) -> None:
    together = convert(vectors, kind)
    alone = np.concatenate([convert(row[None], kind) for row in vectors])
    np.testing.assert_array_equal(together, alone)
    packed = [np.frombuffer(row, together.dtype) for row in rows_of(kind, True)(vectors)]
    np.testing.assert_array_equal(np.stack(packed), together)
    np.testing.assert_array_equal(np.array(rows_of(kind, False)(vectors), together.dtype), together)
