"""The similarity functions equal those of sentence-transformers, for every type of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SimilarityFunction

from sbert_infer.similarity import SIMILARITIES, pairwise_similarity, similarity

GENERATOR = np.random.default_rng(0)
A = GENERATOR.normal(size=(7, 13)).astype(np.float32)
B = GENERATOR.normal(size=(5, 13)).astype(np.float32)
B[2] = A[3]  # at distance zero
B[4] = 0  # has no direction

FORMS: dict[str, Any] = {
    "array": lambda x: x,
    "tensor": torch.from_numpy,
    "list of arrays": list,
    "list of tensors": lambda x: list(torch.from_numpy(x)),
    "list of lists": lambda x: x.tolist(),
    "double": lambda x: x.astype(np.float64),
    "tensor with gradient": lambda x: torch.from_numpy(x).clone().requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SIMILARITIES)
def test_all_pairs(name: str, form: str) -> None:
    expected = SimilarityFunction.to_similarity_fn(name)(A, B)
    found = similarity(name, FORMS[form](A), FORMS[form](B))
    assert isinstance(found, torch.Tensor) == ("tensor" in form)
    # Where the distance is zero, the result is the square root of a rounding error.
    np.testing.assert_allclose(np.asarray(found), expected, atol=2e-3 if name == "euclidean" else 1e-5, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SIMILARITIES)
def test_row_by_row(name: str, form: str) -> None:
    expected = SimilarityFunction.to_similarity_pairwise_fn(name)(A[:5], B)
    found = pairwise_similarity(name, FORMS[form](A[:5]), FORMS[form](B))
    assert found.shape == (5,)
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_one_vector(name: str) -> None:
    expected = SimilarityFunction.to_similarity_fn(name)(A[0], B[0])
    for form in ("array", "tensor", "list of lists"):
        found = similarity(name, FORMS[form](A[0]), FORMS[form](B[0]))
        assert tuple(found.shape) == (1, 1)
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)
    np.testing.assert_allclose(similarity(name, A[0], B)[0], similarity(name, A, B)[0], atol=1e-6)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_no_vectors(name: str) -> None:
    assert similarity(name, A[:0], B).shape == (0, 5)
    assert similarity(name, A, B[:0]).shape == (7, 0)
    assert pairwise_similarity(name, A[:0], B[:0]).shape == (0,)


def test_fewer_bits() -> None:
    whole = GENERATOR.integers(-127, 127, size=(4, 8)).astype(np.int8)
    np.testing.assert_array_equal(similarity("dot", whole, whole), whole.astype(int) @ whole.astype(int).T)
    half = torch.from_numpy(A).to(torch.bfloat16)
    np.testing.assert_allclose(similarity("cosine", half, half), similarity("cosine", A, A), atol=0.02)


def test_double_precision_is_kept() -> None:
    x = torch.tensor([[1.0, 1e-9]], dtype=torch.float64)
    y = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    assert similarity("dot", x + 1, y).item() == 1 + 1e-9


@pytest.mark.parametrize("name", ["euclidean", "manhattan"])
def test_a_vector_is_at_no_distance_from_itself(name: str) -> None:
    rows = np.random.default_rng(3).normal(size=(40, 384)).astype(np.float32)
    found = similarity(name, rows, rows)
    assert np.array_equal(found.diagonal(), np.zeros(40))
    close = rows + np.float32(1e-4)
    exact = SimilarityFunction.to_similarity_pairwise_fn(name)(rows.astype(np.float64), close.astype(np.float64))
    np.testing.assert_allclose(similarity(name, rows, close).diagonal(), exact, rtol=1e-3)


@pytest.mark.parametrize("name", SIMILARITIES)
def test_two_vectors_give_one_number(name: str) -> None:
    found, expected = (
        pairwise_similarity(name, A[0], B[0]),
        SimilarityFunction.to_similarity_pairwise_fn(name)(A[0], B[0]),
    )
    assert found.shape == tuple(expected.shape) == ()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
