"""Multi-vector encoders: vectors and MaxSim equal those of sentence-transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules.token_pooling import (
    HierarchicalTokenPooling,
    LambdaTokenPooling,
)
from sentence_transformers.util.similarity import maxsim as reference_maxsim
from sentence_transformers.util.similarity import maxsim_pairwise as reference_maxsim_pairwise

from sbert_infer import AsyncEngine, Engine
from sbert_infer import similarity as similarities
from sbert_infer.errors import ArtifactError, EngineError, SbertInferWarning, TruncationError
from sbert_infer.similarity import maxsim, maxsim_pairwise
from tests.models.graphs import Array, assert_close
from tests.models.multi_vectors import ALL_TEXTS, DIM, FIXED, export_multi_vector, one_thread

# A query is filled up to 12 tokens, which are attended to, and some of its tokens also get no
# vector.
LEAST: dict[str, Any] = {
    "family": "modernbert",
    "query_expansion": {"strategy": "min", "length": 12, "attend": True},
    "query_length": 20,
    "mask": {"skiplist_words": [".", ","], "skiplist_tasks": ["query", "document"]},
    "normalize": False,
    "similarity": "meanmaxsim",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=["fixed", "least"])
def both(request: pytest.FixtureRequest, once: Callable[..., Path]) -> Iterator[tuple[Engine, MultiVectorEncoder]]:
    folder, path = export_multi_vector(once, **(FIXED if request.param == "fixed" else LEAST))
    with Engine(path, on_truncate="ignore") as engine:
        yield engine, MultiVectorEncoder(str(folder), device="cpu")


@pytest.fixture(scope="module")
def colbert(once: Callable[..., Path]) -> Path:
    return export_multi_vector(once, **FIXED)[1]


@pytest.fixture
def engine(colbert: Path) -> Iterator[Engine]:
    with Engine(colbert, on_truncate="ignore") as engine:
        yield engine


def assert_same(found: list[Array], expected: list[Array]) -> None:
    assert [vectors.shape for vectors in found] == [vectors.shape for vectors in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, 1e-5)


@pytest.mark.parametrize("method", ["encode_query", "encode_document", "encode"])
def test_vectors(both: tuple[Engine, MultiVectorEncoder], method: str) -> None:
    engine, model = both
    found = getattr(engine, method)(ALL_TEXTS, convert_to_numpy=True)
    assert_same(found, getattr(model, method)(ALL_TEXTS, convert_to_numpy=True))
    one = getattr(engine, method)(ALL_TEXTS[2], convert_to_numpy=True)
    assert_close(one, found[2], 1e-5)
    assert getattr(engine, method)([]) == getattr(model, method)([]) == []


@pytest.mark.parametrize("options", [{}, {"convert_to_numpy": False}, {"normalize_embeddings": True, "batch_size": 1}])
@pytest.mark.parametrize("inputs", [ALL_TEXTS[:3], ALL_TEXTS[2]])
def test_tensors(both: tuple[Engine, Any], inputs: Any, options: dict[str, Any]) -> None:
    """Tensors are the default, as in sentence-transformers."""
    found, expected = (model.encode_document(inputs, **options) for model in both)
    assert type(found) is type(expected)
    if isinstance(inputs, str):
        found, expected = [found], [expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert isinstance(ours, torch.Tensor)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_token_pooling(both: tuple[Engine, Any]) -> None:
    engine, _ = both
    for pooling in (HierarchicalTokenPooling(pool_factor=2), LambdaTokenPooling(lambda vectors: vectors[:2])):
        found, expected = (model.encode_document(ALL_TEXTS, token_pooling=pooling) for model in both)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert [len(vectors) for vectors in found] != [len(vectors) for vectors in engine.encode_document(ALL_TEXTS)]
        queries = [model.encode_query(ALL_TEXTS[3], token_pooling=pooling) for model in both]  # they stay as they are
        torch.testing.assert_close(*queries, atol=1e-5, rtol=0)
        arrays = engine.encode_document(ALL_TEXTS[0], token_pooling=pooling, convert_to_numpy=True)
        assert isinstance(arrays, np.ndarray)
        assert_close(arrays, found[0].numpy(), 1e-5)
        assert engine.encode_document([], token_pooling=pooling) == []
    with pytest.raises(TypeError, match="token_pooling must be a BaseTokenPooling of sentence-transformers, got int"):
        engine.encode_document("a", token_pooling=2)


@pytest.mark.parametrize("method", ["encode_query", "encode_document", "encode"])
def test_all_features(both: tuple[Engine, Any], method: str) -> None:
    """Upstream's are padded; ours are those of the tokens that its mask keeps."""
    found, expected = (getattr(model, method)(ALL_TEXTS, prompt="see: ", output_value=None) for model in both)
    for ours, theirs in zip(found, expected, strict=True):
        kept = theirs["attention_mask"].bool()
        assert ours["attention_mask"].bool().all()
        assert torch.equal(ours["input_ids"], theirs["input_ids"][kept])
        torch.testing.assert_close(ours["token_embeddings"], theirs["token_embeddings"][kept], atol=1e-5, rtol=0)
        assert (ours["modality"], ours["prompt_length"]) == (theirs["modality"], theirs["prompt_length"])
    engine, _ = both
    assert engine.encode([], output_value=None) == []
    pooling = LambdaTokenPooling(lambda vectors: vectors[:2])
    (pooled,) = engine.encode_document(["a text of several words"], output_value=None, token_pooling=pooling)
    assert (len(pooled["token_embeddings"]), len(pooled["attention_mask"]), "input_ids" in pooled) == (2, 2, False)
    assert "prompt_length" not in engine.encode("a", output_value=None, prompt="")


def test_without_torch(both: tuple[Engine, MultiVectorEncoder], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = both
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineError, match=r"tensors need torch, which is not installed: .* pass convert_to_numpy=True"):
        engine.encode_query("a")
    with Engine(engine.artifact.path, verify="always") as opened:  # its canaries need no torch, either
        vectors = opened.encode_query(["a", "b"], convert_to_numpy=True)
        assert isinstance(opened.similarity(vectors, vectors), np.ndarray)


def test_prompts(both: tuple[Engine, MultiVectorEncoder]) -> None:
    engine, model = both
    options: dict[str, Any] = {"prompt": "see: "}
    found: Any = engine.encode_query(ALL_TEXTS, convert_to_numpy=True, **options)
    assert_same(found, model.encode_query(ALL_TEXTS, convert_to_numpy=True, **options))
    found = engine.encode(ALL_TEXTS, prompt_name="query", task="document", convert_to_numpy=True)
    assert_same(found, model.encode(ALL_TEXTS, prompt_name="query", task="document", convert_to_numpy=True))


def test_similarity(both: tuple[Engine, MultiVectorEncoder]) -> None:
    engine, model = both
    queries, documents = engine.encode_query(ALL_TEXTS[:5]), engine.encode_document(ALL_TEXTS)
    expected = model.similarity(queries, documents).numpy()
    np.testing.assert_allclose(engine.similarity(queries, documents), expected, rtol=1e-5, atol=1e-5)
    pairs = model.similarity_pairwise(queries, documents[:5]).numpy()
    np.testing.assert_allclose(engine.similarity_pairwise(queries, documents[:5]), pairs, rtol=1e-5, atol=1e-5)
    calls: list[dict[str, Any]] = [{"chunk_elements": 9}, {"length_normalize": True}, {"length_normalize": False}]
    for options in [*calls, {"device": "cpu"}]:
        for method, right in (("similarity", documents), ("similarity_pairwise", documents[:5])):
            ours, theirs = (getattr(each, method)(queries, right, **options) for each in both)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="MaxSim is computed on the CPU, got device='cuda'"):
        engine.similarity(queries, documents, device="cuda")
    with pytest.raises(ValueError, match="chunk_elements must be at least 1, got 0"):
        engine.similarity(queries, documents, chunk_elements=0)
    with pytest.raises(TypeError, match="chunks"):
        engine.similarity(queries, documents, chunks=3)
    assert engine.similarity_fn_name == model.similarity_fn_name
    with pytest.raises(ValueError, match="must be one of maxsim, meanmaxsim, got 'cosine'"):
        engine.similarity_fn_name = "cosine"


def test_many_windows(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine.encode_document(ALL_TEXTS, convert_to_numpy=True)
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 5)
    assert_same(engine.encode_document(ALL_TEXTS, convert_to_numpy=True), expected)


def test_a_text_over_its_roles_limit(colbert: Path) -> None:
    long, short = "one two three four five six seven eight nine", "one"
    with Engine(colbert) as engine, pytest.warns(SbertInferWarning, match="1 of 2 texts were cut to 16 tokens"):
        engine.encode_query([short, long])
    with Engine(colbert, on_truncate="error") as engine:
        with pytest.raises(TruncationError, match="text 1 has more than 16 tokens"):
            engine.encode_query([short, long])
        engine.encode_document([short, long])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"precision": "int8"}, "precision"),
        ({"truncate_dim": 8}, "truncate_dim"),
        ({"convert_to_tensor": True}, "convert_to_tensor"),
        ({"out": np.empty((1, DIM), np.float32)}, "out"),
        ({"max_active_dims": 3}, "max_active_dims"),
        ({"convert_to_sparse_tensor": True}, "convert_to_sparse_tensor"),
        ({"save_to_cpu": True}, "save_to_cpu"),
    ],
)
def test_what_does_not_apply_is_refused(engine: Engine, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: not for"):
        engine.encode_query(["a"], **options)


def test_other_calls_are_refused(engine: Engine, colbert: Path) -> None:
    with pytest.raises(ValueError, match="encode_windows: not for colbert, which gives a vector for each token"):
        next(engine.encode_iter(["a"]))
    with pytest.raises(ValueError, match="max_seq_length: not for"):
        engine.max_seq_length = 8
    for call in (lambda: engine.token_vectors(["a"]), lambda: engine.encode_spans("a", [(0, 1)])):
        with pytest.raises(ValueError, match="use encode_query or encode_document"):
            call()
    with pytest.raises(ValueError, match="task must be 'query', 'document' or None, got 'title'"):
        engine.encode("a", task="title")
    with pytest.raises(TypeError, match="text 1 must be a str"):
        engine.encode_query(["a", 3])  # type: ignore[list-item]
    with pytest.raises(ArtifactError, match="is a multi-vector encoder: open it with Engine, not with AsyncEngine"):
        AsyncEngine(colbert)
    with pytest.raises(ArtifactError, match="is a multi-vector encoder: open it with Engine, not with AsyncEngine"):
        AsyncEngine(engine)


# MaxSim -------------------------------------------------------------------------------------------

GENERATOR = np.random.default_rng(0)


def some_vectors(*counts: int) -> list[Array]:
    return [GENERATOR.normal(size=(count, 7)).astype(np.float32) for count in counts]


@given(
    st.lists(st.integers(0, 5), max_size=5), st.lists(st.integers(0, 9), max_size=9), st.integers(1, 40), st.booleans()
)
def test_maxsim(queries: list[int], documents: list[int], most: int, mean: bool) -> None:
    """For any chunk size. A query without vectors scores 0, a document without vectors -1e9."""
    a, b = some_vectors(*queries), some_vectors(*documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(similarities, "_MAX_PRODUCTS", most)
        found = maxsim(a, b, mean=mean)
    assert found.shape == (len(a), len(b))
    for i, query in enumerate(a):
        for j, document in enumerate(b):
            best = sum(max(float(x @ y) for y in document) for x in query) if len(document) else -1e9
            expected = best / len(query) if mean and len(query) and len(document) else best
            assert found[i, j] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("form", ["arrays", "tensors", "padded", "padded tensor", "one", "halves"])
def test_forms(form: str) -> None:
    forms: dict[str, Callable[[list[Array]], Any]] = {
        "arrays": list,
        "tensors": lambda texts: [torch.from_numpy(text) for text in texts],
        "padded": lambda texts: np.stack([np.pad(text, ((0, 9 - len(text)), (0, 0))) for text in texts]),
        "padded tensor": lambda texts: torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(text) for text in texts], True
        ),
        "one": lambda texts: texts[0],
        "halves": lambda texts: [text.astype(np.float16) for text in texts],
    }
    a, b = (forms[form](some_vectors(*counts)) for counts in ((3, 1, 4), (2, 9, 1)))
    if form == "halves":
        a, b = ([text.astype(np.float32) for text in side] for side in (a, b))
    found, pairs = maxsim(a, b), maxsim_pairwise(a, b)
    assert isinstance(found, torch.Tensor) == isinstance(pairs, torch.Tensor) == ("tensor" in form)
    np.testing.assert_allclose(np.asarray(found), reference_maxsim(a, b), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(pairs), reference_maxsim_pairwise(a, b), rtol=1e-5, atol=1e-5)


def test_bad_forms() -> None:
    with pytest.raises(ValueError, match="the vectors have different lengths: 3, 7"):
        maxsim(some_vectors(2), [np.ones((2, 3), np.float32)])
    with pytest.raises(ValueError, match=r"an array \[tokens, dim\] of each text"):
        maxsim([np.ones(3)], some_vectors(2))
    with pytest.raises(ValueError, match="got one with 1 dimensions"):
        maxsim(np.ones(3), some_vectors(2))
    with pytest.raises(ValueError, match="2 queries can't be paired with 1 documents"):
        maxsim_pairwise(some_vectors(2, 2), some_vectors(2))
