"""Sparse vectors of `Engine`, `AsyncEngine` and the server equal those of `SparseEncoder`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sentence_transformers import SparseEncoder
from sentence_transformers.util import select_max_active_dims

from sbert_infer import AsyncEngine, Engine
from sbert_infer.embed.embedder import Embedder
from sbert_infer.encode.sparse import SparseOutput, SparseRows
from sbert_infer.errors import ArtifactError, EngineError, SbertInferWarning, TruncationError
from sbert_infer.serve.settings import ModelFile, Settings
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.sparse_encoders import assert_same, splade_checkpoint, splade_onnx
from tests.sbert_infer.serve.conftest import start

Once = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS, TEXTS[0]]


@pytest.fixture(scope="module")
def path(once: Once) -> Path:
    return splade_onnx(once)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine(path, on_truncate="ignore") as engine:
        yield engine


@pytest.fixture(scope="module")
def model(once: Once) -> SparseEncoder:
    return SparseEncoder(str(splade_checkpoint(once)), device="cpu")


def dense(vectors: Any) -> np.ndarray[Any, Any]:
    """Return a result of sentence-transformers as a dense array."""
    array: np.ndarray[Any, Any] = vectors.to_dense().numpy()
    return array


def test_encode(engine: Engine, model: SparseEncoder) -> None:
    found = engine.encode(ALL_TEXTS)
    assert isinstance(found, pytest.importorskip("scipy.sparse").csr_matrix)
    assert found.shape == (len(ALL_TEXTS), engine.get_embedding_dimension())
    assert_same(found, dense(model.encode(ALL_TEXTS)))
    assert 0.1 < found.nnz / np.prod(found.shape) < 0.9  # otherwise the comparison would mean little
    assert_same(engine.encode(TEXTS[3]), dense(model.encode([TEXTS[3]])))
    assert engine.encode([]).shape == (0, engine.get_embedding_dimension())
    assert_same(engine.encode_query(TEXTS), dense(model.encode_query(list(TEXTS))))
    assert_same(engine.encode(TEXTS, prompt="a: "), dense(model.encode(list(TEXTS), prompt="a: ")))
    assert_same(engine.encode(TEXTS, batch_size=1), dense(model.encode(list(TEXTS))))


@pytest.mark.parametrize(
    "options",
    [
        {"convert_to_tensor": True},
        {"convert_to_tensor": False},
        {"convert_to_sparse_tensor": True},
        {"convert_to_sparse_tensor": False},
        {"save_to_cpu": True},
        {"save_to_cpu": False, "convert_to_tensor": False, "convert_to_sparse_tensor": False},
    ],
)
@pytest.mark.parametrize("inputs", [list(TEXTS[:3]), TEXTS[0], []])
def test_tensors(engine: Engine, model: SparseEncoder, inputs: Any, options: dict[str, Any]) -> None:
    """Any argument of `SparseEncoder.encode` about tensors gives the tensors that it returns."""
    found, right = engine.encode(inputs, **options), model.encode(inputs, **options)
    assert type(found) is type(right)
    if not isinstance(found, list):
        found, right = [found], [right]
    for ours, theirs in zip(found, right, strict=True):
        assert ours.is_sparse == theirs.is_sparse
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(dense(ours), dense(theirs), rtol=0, atol=1e-5)


def test_forms_of_sentence_transformer(engine: Any) -> None:
    """Arguments that `SparseEncoder` does not have mean what they mean for dense vectors."""
    assert isinstance(engine.encode(["a"], convert_to_numpy=False), list)
    assert engine.encode(["a"], convert_to_numpy=True, convert_to_tensor=False).format == "csr"
    assert engine.encode(["a"], convert_to_numpy=True, convert_to_tensor=True).is_sparse
    with pytest.raises(ValueError, match="convert_to_numpy=True gives a CSR matrix: leave convert_to_sparse_tensor"):
        engine.encode(["a"], convert_to_numpy=True, convert_to_sparse_tensor=True)


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_max_active_dims(engine: Any, model: SparseEncoder, most: int) -> None:
    found = engine.encode(TEXTS, max_active_dims=most)
    assert_same(found, dense(model.encode(list(TEXTS), max_active_dims=most)))
    assert found.getnnz(axis=1).max() <= most
    with pytest.raises(ValueError, match="max_active_dims must be at least 1, got 0"):
        engine.encode(TEXTS, max_active_dims=0)


def test_streams(engine: Any) -> None:
    right = engine.encode(ALL_TEXTS).toarray()
    rows: list[Any] = list(engine.encode_iter(iter(ALL_TEXTS)))
    assert all(row.shape == (1, right.shape[1]) for row in rows)
    np.testing.assert_array_equal(np.vstack([row.toarray() for row in rows]), right)
    windows = list(engine.encode_windows(ALL_TEXTS))
    assert sum(window.stats.texts for window in windows) == len(ALL_TEXTS)
    assert windows[0].vectors.format == "csr"


@pytest.mark.parametrize("name", [None, "dot", "cosine", "euclidean", "manhattan"])
def test_similarity(engine: Engine, model: SparseEncoder, name: str | None) -> None:
    ours, theirs = engine.encode(TEXTS), model.encode(list(TEXTS))
    before = engine.similarity_fn_name
    assert before == "dot"
    try:
        engine.similarity_fn_name = model.similarity_fn_name = name or "dot"
        some, right = engine.similarity(ours[:5], ours), model.similarity(theirs.to_dense()[:5], theirs.to_dense())
        np.testing.assert_allclose(some, right.numpy(), rtol=1e-4, atol=2e-4)
        pairs = engine.similarity_pairwise(ours[:3], ours[3:6])
        np.testing.assert_allclose(pairs, engine.similarity(ours[:3], ours[3:6]).diagonal(), rtol=1e-4, atol=2e-4)
        for form in (theirs, list(theirs), theirs.to_dense(), theirs.to_dense()[2]):
            tensor, pairs = engine.similarity(form, form), engine.similarity_pairwise(form, form)
            assert isinstance(tensor, torch.Tensor)
            solid = theirs.to_dense()[2:3] if getattr(form, "ndim", 2) == 1 else theirs.to_dense()
            torch.testing.assert_close(tensor, model.similarity(solid, solid), rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(pairs, model.similarity_pairwise(solid, solid), rtol=1e-4, atol=1e-3)
    finally:
        engine.similarity_fn_name = model.similarity_fn_name = before


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"normalize_embeddings": True, "precision": "int8"}, "normalize_embeddings, precision: not for splade"),
        ({"truncate_dim": 8}, "truncate_dim: not for"),
        ({"output_value": "token_embeddings"}, "output_value: not for"),
        ({"out": np.empty((1, 370), np.float32)}, "out: not for"),
    ],
)
def test_refused(engine: Engine, options: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=f"{names}.*whose vectors are sparse"):
        engine.encode(["a"], **options)


def test_refused_elsewhere(engine: Engine, path: Path, small_onnx: Path) -> None:
    with pytest.raises(ValueError, match="normalize_embeddings: not for"):
        next(engine.encode_windows(["a"], normalize_embeddings=True))
    with pytest.raises(ValueError, match="embeddings of a sparse encoder are needed, got ndarray"):
        engine.similarity(np.zeros((1, 1, 370), np.float32), engine.encode(["a"]))
    with pytest.raises(ValueError, match=r"embeddings of the shapes \[1, 3\] and \[1, [0-9]+\] can't be compared"):
        engine.similarity(np.zeros(3, np.float32), engine.encode(["a"]))
    with pytest.raises(ArtifactError, match="a sparse encoder: open it with Engine, not with sbert-embed"):
        Embedder(path)
    with Engine(small_onnx) as small:
        with pytest.raises(ValueError, match=r"max_active_dims: not for .* whose vectors are dense"):
            small.encode("a", max_active_dims=3)
        with pytest.raises(ValueError, match=r"convert_to_sparse_tensor, save_to_cpu: not for"):
            small.encode("a", convert_to_sparse_tensor=True, save_to_cpu=True)
        with pytest.raises(ValueError, match="token_pooling: not for"):
            small.encode("a", token_pooling=object())


def test_truncation(path: Path) -> None:
    with Engine(path) as engine, pytest.warns(SbertInferWarning, match="1 of 2 texts were cut to 64 tokens"):
        engine.encode(["short", "long " * 99])
    with Engine(path, on_truncate="error") as engine, pytest.raises(TruncationError, match="text 1 "):
        engine.encode(["short", "long " * 99])


def test_without_scipy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(EngineError, match=r"need scipy: pip install 'sbert-infer\[sparse\]'"):
        engine.encode("a")
    assert engine.encode("a", convert_to_tensor=True).is_sparse


def test_batches_of_wide_vectors_are_small(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are limited, because vectors are dense until their batch is done."""
    from dataclasses import replace

    for vocabulary, most in ((30_522, 137), (250_002, 16), (2**23, 1)):
        manifest = replace(engine.manifest, dim=vocabulary)
        assert SparseOutput(manifest).max_batch_texts == most
    monkeypatch.setattr("sbert_infer.encode.sparse._MAX_BATCH_NUMBERS", 2 * engine.manifest.dim)
    for batch_size, batches in ((None, 3), (3, 3), (1, 6)):  # the smaller limit applies
        engine.encode(["a", "b", "c", "d", "e", "f"], batch_size=batch_size)
        assert engine.last_stats.batches == batches


numbers = st.floats(-8, 8, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)


@settings(deadline=None, max_examples=60)
@given(
    arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.just(0.0) | numbers),
    st.none() | st.integers(1, 10),
    st.data(),
)
def test_rows(vectors: np.ndarray[Any, Any], most: int | None, data: st.DataObject) -> None:
    """Rows may be set and read in any order; of equal magnitudes any may be kept."""
    order = np.array(data.draw(st.permutations(range(len(vectors)))))
    cut = data.draw(st.integers(0, len(order)))
    rows = SparseRows(len(vectors), vectors.shape[1], most)
    for part in (order[cut:], order[:cut]):
        assert rows.put(part, [vectors[part]]).tolist() == []  # all are finite
    right = vectors if most is None else select_max_active_dims(vectors, most).numpy()
    found = rows.result(order).to_csr().toarray()
    np.testing.assert_array_equal(np.sort(np.abs(found)), np.sort(np.abs(right[order])))
    assert np.all((found == vectors[order]) | (found == 0))
    np.testing.assert_array_equal(rows.to_dense()[order], found)


def test_rows_that_are_not_finite() -> None:
    for most in (None, 1):  # NaN must be reported even if only the largest values are kept
        rows = SparseRows(3, 2, most)
        bad = rows.put(np.array([2, 0]), [np.array([[3, np.nan], [1, 2]], np.float32)])
        assert bad.tolist() == [2]


def test_async(path: Path, engine: Any) -> None:
    async def run() -> None:
        async with AsyncEngine(path) as server:
            calls = [server.encode_sparse(ALL_TEXTS, on_truncate="ignore"), server.encode_sparse([TEXTS[1]])]
            many, one = await asyncio.gather(*calls)
            np.testing.assert_allclose(many.vectors.to_dense(), engine.encode(ALL_TEXTS).toarray(), rtol=0, atol=1e-5)
            assert len(one.vectors) == 1
            assert len((await server.encode_sparse([])).vectors) == 0
            with pytest.raises(TypeError, match="encode_sparse needs a list of texts, got one str"):
                await server.encode_sparse("a text")
            with pytest.raises(EngineError, match="is a sparse encoder: use encode_sparse"):
                await server.encode("a")

    asyncio.run(run())


def test_over_http(path: Path, engine: Any) -> None:
    running = start(Settings((ModelFile(path, "splade"),), port=0))
    try:
        answer = running.post("/embed_sparse", {"inputs": [*TEXTS, " "]})
        one = running.post("/embed_sparse", {"inputs": TEXTS[0], "prompt_name": "query"})
        invoked = running.post("/invocations", {"inputs": [*TEXTS, " "]})
        refused = [
            running.post("/embed", {"inputs": "a"}),
            running.post("/v1/embeddings", {"input": "a", "model": "splade"}),
            running.post("/embed_sparse", {"inputs": "long " * 99, "truncate": False}),
            running.post("/embed_sparse", {"inputs": "a", "prompt_name": "none"}),
        ]
        paths = running.client.get("/openapi.json").json()["paths"]
    finally:
        running.stop()
    right = engine.encode([*TEXTS, " "], prompt="").toarray()
    assert answer.status_code == 200, answer.text
    for found, row in zip(answer.json(), right, strict=True):
        dims = np.flatnonzero(row)
        assert [item["index"] for item in found] == dims.tolist()
        np.testing.assert_allclose([item["value"] for item in found], row[dims], rtol=0, atol=1e-5)
    assert invoked.json() == answer.json()
    query = engine.encode_query([TEXTS[0]])
    assert [[item["index"] for item in row] for row in one.json()] == [query.indices.tolist()]
    assert [answer.status_code for answer in refused] == [404, 404, 413, 422]
    assert "model splade is a sparse encoder: use /embed_sparse" in refused[0].text
    assert "model splade is a sparse encoder: use /embed_sparse" in refused[1].text
    assert "/embed_sparse" in paths
