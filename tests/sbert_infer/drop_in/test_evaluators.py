"""sentence-transformers' evaluators for sparse, multi-vector and cross-encoders take ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SparseEncoder
from sentence_transformers.cross_encoder import evaluation as cross_encoder
from sentence_transformers.multi_vector_encoder import evaluation as multi_vector
from sentence_transformers.sentence_transformer import evaluation as dense
from sentence_transformers.sparse_encoder import evaluation as sparse

from sbert_infer import Engine, Reranker
from tests.models.checkpoints import TEXTS
from tests.models.multi_vectors import FIXED, export_multi_vector, one_thread
from tests.models.sparse_encoders import splade_checkpoint, splade_onnx
from tests.sbert_infer.drop_in.test_sentence_transformers import EVALUATORS

datasets = pytest.importorskip("datasets")

LEFT, RIGHT = list(TEXTS[:5]), list(TEXTS[5:10])
SCORES = [0.9, 0.1, 0.5, 0.3, 0.7]
LABELS = [1, 0, 1, 0, 1]
QUERIES = {f"q{number}": text for number, text in enumerate(LEFT)}
CORPUS = {f"d{number}": text for number, text in enumerate([*RIGHT, *LEFT, "Rain fell all day."])}
RELEVANT = {f"q{number}": {f"d{number}"} for number in range(len(LEFT))}
SAMPLES = [
    {"query": query, "positive": [right], "negative": [text for text in RIGHT[::-1] if text != right]}
    for query, right in zip(LEFT, RIGHT, strict=True)
]
QUIET: dict[str, Any] = {"show_progress_bar": False, "batch_size": 3}
NANO: dict[str, Any] = {"dataset_names": ["msmarco"], "show_progress_bar": False}

SPARSE: dict[str, Callable[[Any], Any]] = {
    "EmbeddingSimilarity": lambda _: sparse.SparseEmbeddingSimilarityEvaluator(LEFT, RIGHT, SCORES, **QUIET),
    "InformationRetrieval": lambda _: sparse.SparseInformationRetrievalEvaluator(
        QUERIES, CORPUS, RELEVANT, corpus_chunk_size=4, max_active_dims=40, **QUIET
    ),
    "BinaryClassification": lambda _: sparse.SparseBinaryClassificationEvaluator(LEFT, RIGHT, LABELS, **QUIET),
    "MSE": lambda teacher: sparse.SparseMSEEvaluator(LEFT, RIGHT, teacher_model=teacher, **QUIET),
    "NanoBEIR": lambda _: sparse.SparseNanoBEIREvaluator(**NANO),
    "Triplet": lambda _: sparse.SparseTripletEvaluator(LEFT, RIGHT, RIGHT[::-1], **QUIET),
    "Translation": lambda _: sparse.SparseTranslationEvaluator(LEFT, RIGHT, **QUIET),
    "Reranking": lambda _: sparse.SparseRerankingEvaluator(SAMPLES, **QUIET),
}
MULTI_VECTOR: dict[str, Callable[[], Any]] = {
    "InformationRetrieval": lambda: multi_vector.MultiVectorInformationRetrievalEvaluator(
        QUERIES, CORPUS, RELEVANT, chunk_elements=5000, **QUIET
    ),
    "NanoBEIR": lambda: multi_vector.MultiVectorNanoBEIREvaluator(**NANO),
    "Triplet": lambda: multi_vector.MultiVectorTripletEvaluator(LEFT, RIGHT, RIGHT[::-1], **QUIET),
    "Distillation": lambda: multi_vector.MultiVectorDistillationEvaluator(LEFT, RIGHT, SCORES, **QUIET),
    "Distillation of several": lambda: multi_vector.MultiVectorDistillationEvaluator(
        LEFT, [[right, left] for left, right in zip(LEFT, RIGHT, strict=True)], [[s, 1 - s] for s in SCORES], **QUIET
    ),
    "Reranking": lambda: multi_vector.MultiVectorRerankingEvaluator(SAMPLES, **QUIET),
    "Reranking one by one": lambda: multi_vector.MultiVectorRerankingEvaluator(
        SAMPLES, use_batched_encoding=False, **QUIET
    ),
}
PAIRS = list(zip(LEFT, RIGHT, strict=True))
CROSS_ENCODER: dict[str, Callable[[], Any]] = {
    "Classification": lambda: cross_encoder.CrossEncoderClassificationEvaluator(PAIRS, LABELS, **QUIET),
    "Correlation": lambda: cross_encoder.CrossEncoderCorrelationEvaluator(PAIRS, SCORES, **QUIET),
    "Reranking": lambda: cross_encoder.CrossEncoderRerankingEvaluator(SAMPLES, **QUIET),
    "NanoBEIR": lambda: cross_encoder.CrossEncoderNanoBEIREvaluator(**NANO),
}


@pytest.fixture(autouse=True)
def nano_beir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A data set in the layout of NanoBEIR, which is not downloaded."""
    tables: dict[str, list[dict[str, Any]]] = {
        "queries": [{"_id": key, "text": text} for key, text in QUERIES.items()],
        "corpus": [{"_id": key, "text": text} for key, text in CORPUS.items()],
        "qrels": [{"query-id": query, "corpus-id": min(documents)} for query, documents in RELEVANT.items()],
        "bm25": [{"query-id": query, "corpus-ids": list(CORPUS)} for query in QUERIES],
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda _, subset, split: datasets.Dataset.from_list(tables[subset]))
    with one_thread():
        yield


@pytest.fixture(scope="module")
def splade(once: Callable[..., Path]) -> Iterator[tuple[Engine, Any]]:
    with Engine(splade_onnx(once), on_truncate="ignore") as engine:
        yield engine, SparseEncoder(str(splade_checkpoint(once)), device="cpu")


@pytest.fixture(scope="module")
def colbert(once: Callable[..., Path]) -> Iterator[tuple[Engine, Any]]:
    folder, path = export_multi_vector(once, **FIXED)
    with Engine(path, on_truncate="ignore") as engine:
        yield engine, MultiVectorEncoder(str(folder), device="cpu")


@pytest.fixture(scope="module")
def reranker(reranker_onnx: Path, reranker_checkpoint: Path) -> Iterator[tuple[Reranker, Any]]:
    with Reranker(reranker_onnx, on_truncate="ignore") as reranker:
        yield reranker, CrossEncoder(str(reranker_checkpoint), device="cpu")


def assert_same(evaluators: tuple[Any, Any], models: tuple[Any, Any], folder: Path) -> None:
    """Both models get the same numbers, and the model card some of them."""
    found, expected = (
        evaluator(model, output_path=str(folder)) for evaluator, model in zip(evaluators, models, strict=True)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert models[0].model_card_data.metrics.keys() & found.keys()


@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name: str, splade: tuple[Engine, Any], tmp_path: Path) -> None:
    assert_same((SPARSE[name](splade[1]), SPARSE[name](splade[1])), splade, tmp_path)


def test_an_engine_as_teacher(splade: tuple[Engine, Any]) -> None:
    ours, theirs = (SPARSE["MSE"](teacher)(splade[1]) for teacher in splade)
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", MULTI_VECTOR)
def test_multi_vector(name: str, colbert: tuple[Engine, Any], tmp_path: Path) -> None:
    assert_same((MULTI_VECTOR[name](), MULTI_VECTOR[name]()), colbert, tmp_path)


@pytest.mark.parametrize("name", CROSS_ENCODER)
def test_cross_encoder(name: str, reranker: tuple[Reranker, Any], tmp_path: Path) -> None:
    assert_same((CROSS_ENCODER[name](), CROSS_ENCODER[name]()), reranker, tmp_path)


def test_none_is_missing() -> None:
    """All evaluators that need a model, but for the old names of cross-encoders' (CE...)."""
    kinds: list[tuple[Any, str, dict[str, Any]]] = [
        (sparse, "Sparse", SPARSE),
        (multi_vector, "MultiVector", MULTI_VECTOR),
        (cross_encoder, "CrossEncoder", CROSS_ENCODER),
    ]
    for module, prefix, ours in kinds:
        names = {name for name in module.__all__ if name.startswith(prefix)}
        assert {f"{prefix}{name.split()[0]}Evaluator" for name in ours} == names


def test_no_dense_one_is_missing() -> None:
    """Those of `test_sentence_transformers.py`."""
    ours = {f"{name.split()[0]}Evaluator" for name in (*EVALUATORS, "MSE", "LabelAccuracy", "NanoBEIR")}
    bases = {"BaseEvaluator", "SentenceEvaluator"}
    assert ours | {"MSEEvaluatorFromDataFrame"} == {n for n in dense.__all__ if "Evaluator" in n} - bases
