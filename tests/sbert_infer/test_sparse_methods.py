"""What `Engine` does with sparse vectors equals what `SparseEncoder` does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder

from sbert_infer import AsyncEngine, Engine
from sbert_infer.export.exporter import export
from tests.models.checkpoints import TEXTS
from tests.models.sparse_encoders import assert_same, splade_checkpoint, splade_onnx, write_csr

Once = Callable[..., Path]
Words = list[tuple[str, float]]


@pytest.fixture(scope="module")
def path(once: Once) -> Path:
    return splade_onnx(once)


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine(path, on_truncate="ignore") as engine:
        yield engine


@pytest.fixture
def model(once: Once) -> Any:
    return SparseEncoder(str(splade_checkpoint(once)), device="cpu")


def assert_same_words(found: Words, expected: Words) -> None:
    assert [word for word, _ in found] == [word for word, _ in expected]
    np.testing.assert_allclose([w for _, w in found], [w for _, w in expected], rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_k", [None, 5])
def test_decode(engine: Engine, model: Any, top_k: int | None) -> None:
    vectors = model.encode(list(TEXTS))
    expected: Any = model.decode(vectors, top_k=top_k)
    for form in (vectors, vectors.to_dense(), list(vectors), vectors.to_dense().numpy(), engine.encode(TEXTS)):
        found = engine.decode(form, top_k=top_k)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_words(ours, theirs)
    one = model.encode(TEXTS[2])
    for vector in (one, one.to_dense(), one.to_dense().numpy()):
        assert_same_words(engine.decode(vector, top_k=top_k), model.decode(one, top_k=top_k))
    assert engine.decode(torch.zeros(engine.manifest.dim)) == model.decode(torch.zeros(engine.manifest.dim)) == []
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        engine.decode(one, top_k=0)


def test_sparsity(engine: Engine, model: Any) -> None:
    vectors = model.encode(list(TEXTS))
    for form in (vectors, vectors.to_dense(), vectors[0], vectors[0].to_dense(), torch.zeros(0, 9), torch.zeros(2, 9)):
        assert engine.sparsity(form) == Engine.sparsity(form) == pytest.approx(model.sparsity(form))
    assert engine.sparsity(engine.encode(TEXTS)) == pytest.approx(model.sparsity(vectors))


def test_intersection(engine: Engine, model: Any) -> None:
    query, documents = model.encode_query(TEXTS[0]), model.encode_document(list(TEXTS))
    for form in (documents, documents.to_dense(), documents[3], documents[3].to_dense(), -documents):
        found, expected = (each.intersection(query, form) for each in (engine, model))
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), expected.to_dense())
        assert engine.sparsity(found) == pytest.approx(model.sparsity(expected))
    rows = engine.intersection(engine.encode_query(TEXTS[0]), engine.encode_document(TEXTS))
    expected = model.intersection(query, documents)
    assert_same(rows, expected.to_dense().numpy())
    assert_same_words(engine.decode(rows, 3)[4], model.decode(expected, 3)[4])
    with pytest.raises(ValueError, match="intersection compares one vector with others, got 2"):
        engine.intersection(documents.to_dense()[:2], documents)
    with pytest.raises(ValueError, match="the vectors have different lengths: 3 and"):
        engine.intersection(torch.ones(3), documents)


def test_max_active_dims_is_an_attribute(path: Path, engine: Any, model: Any) -> None:
    assert engine.max_active_dims is model.max_active_dims is None
    engine.max_active_dims = model.max_active_dims = 5
    assert_same(engine.encode(TEXTS), model.encode(list(TEXTS)).to_dense().numpy())
    assert_same(
        engine.encode(TEXTS, max_active_dims=9), model.encode(list(TEXTS), max_active_dims=9).to_dense().numpy()
    )
    assert max(window.vectors.getnnz(axis=1).max() for window in engine.encode_windows(TEXTS)) == 5
    with Engine(path, max_active_dims=5, on_truncate="ignore") as other:
        assert (other.encode(TEXTS) != engine.encode(TEXTS)).nnz == 0
    engine.max_active_dims = None
    assert engine.encode(TEXTS).getnnz(axis=1).max() > 5
    wrong: Any
    for wrong in (0, -1, 2.5, True, "3"):
        with pytest.raises(ValueError, match=f"max_active_dims must be at least 1, got {wrong!r}"):
            engine.max_active_dims = wrong
        with pytest.raises(ValueError, match="max_active_dims must be at least 1"):
            Engine(path, max_active_dims=wrong)


def test_an_engine_in_a_server_keeps_its_setting(engine: Engine) -> None:
    async def run() -> int:
        async with AsyncEngine(engine) as server:
            return max(len(values) for _, values in (await server.encode_sparse(TEXTS[:2])).vectors)

    engine.max_active_dims = 4
    assert asyncio.run(run()) == 4


def test_an_autoencoder(once: Once) -> None:
    """Its own number is the default, also after None; its dimensions are no words."""
    folder = once("csr", "csr", lambda target: write_csr(target))
    path = once("csr", "csr.onnx", lambda target: export(folder, target))
    model: Any = SparseEncoder(str(folder), device="cpu")
    with Engine(path) as engine:
        assert engine.max_active_dims == model.max_active_dims == 6
        engine.max_active_dims = None
        assert engine.max_active_dims == 6
        engine.max_active_dims = 3
        assert_same(engine.encode(TEXTS), model.encode(list(TEXTS), max_active_dims=3).to_dense().numpy())
        with pytest.raises(ValueError, match="the dimensions of csr are no words of its vocabulary"):
            engine.decode(engine.encode("a"))


def test_a_dense_encoder_has_none_of_it(small: Engine, small_onnx: Path) -> None:
    assert small.max_active_dims is None
    with pytest.raises(ValueError, match=r"max_active_dims: not for .* whose vectors are dense"):
        small.max_active_dims = 3
    with pytest.raises(ValueError, match="max_active_dims: not for"):
        Engine(small_onnx, max_active_dims=3)
    with pytest.raises(ValueError, match="are no words"):
        small.decode(small.encode("a"))
