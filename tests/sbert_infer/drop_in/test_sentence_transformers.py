"""Utilities and evaluators of sentence-transformers accept an `Engine` instead of their model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import InputExample, SimilarityFunction, util
from sentence_transformers.sentence_transformer import evaluation, losses
from torch.utils.data import DataLoader

from sbert_infer import Engine, EngineError
from tests.models.checkpoints import TEXTS

PAIRS = [
    ("A man plays the guitar.", "Someone is playing an instrument.", 0.8),
    ("The cat sleeps on the sofa.", "A kitten naps on the couch.", 0.9),
    ("Stocks fell sharply on Monday.", "The recipe needs two eggs.", 0.0),
    ("She drives to work.", "He goes to the office by car.", 0.6),
    ("The sky is blue.", "Quantum computers need cooling.", 0.1),
]
LEFT, RIGHT, SCORES = (list(column) for column in zip(*PAIRS, strict=True))
QUERIES = dict(enumerate(map(str, LEFT)))
CORPUS = {f"d{number}": text for number, text in enumerate(map(str, [*RIGHT, *TEXTS]))}
SENTENCES = {**{f"l{i}": t for i, t in enumerate(LEFT)}, **{f"r{i}": t for i, t in enumerate(RIGHT)}}

EVALUATORS: dict[str, Any] = {
    "EmbeddingSimilarity": lambda: evaluation.EmbeddingSimilarityEvaluator(LEFT, RIGHT, SCORES),
    "EmbeddingSimilarity binary": lambda: evaluation.EmbeddingSimilarityEvaluator(
        LEFT, RIGHT, SCORES, precision="binary"
    ),
    "BinaryClassification": lambda: evaluation.BinaryClassificationEvaluator(
        LEFT, RIGHT, [int(s > 0.5) for s in SCORES]
    ),
    "InformationRetrieval": lambda: evaluation.InformationRetrievalEvaluator(
        {str(key): text for key, text in QUERIES.items()}, CORPUS, {str(key): {f"d{key}"} for key in QUERIES}
    ),
    "Triplet": lambda: evaluation.TripletEvaluator(LEFT, RIGHT, RIGHT[::-1]),
    "Reranking": lambda: evaluation.RerankingEvaluator(
        [{"query": query, "positive": [match], "negative": list(TEXTS)} for query, match, _ in PAIRS]
    ),
    "Translation": lambda: evaluation.TranslationEvaluator(LEFT, RIGHT),
    "ParaphraseMining": lambda: evaluation.ParaphraseMiningEvaluator(SENTENCES, [("l0", "r0"), ("l1", "r1")]),
    "Sequential": lambda: evaluation.SequentialEvaluator(
        [evaluation.TripletEvaluator(LEFT, RIGHT, RIGHT[::-1]), evaluation.TranslationEvaluator(LEFT, RIGHT)]
    ),
}
TEACHERS: dict[str, Any] = {  # evaluators that also encode with a teacher
    "MSE": lambda teacher: evaluation.MSEEvaluator(LEFT, RIGHT, teacher_model=teacher),
    "MSEFromDataFrame": lambda teacher: evaluation.MSEEvaluatorFromDataFrame(
        [{"en": left, "de": right} for left, right, _ in PAIRS], teacher, [("en", "de")]
    ),
}


@pytest.mark.parametrize("name", EVALUATORS)
def test_evaluators(name: str, engine: Engine, minilm: Any, tmp_path: Path) -> None:
    evaluator, expected = EVALUATORS[name](), EVALUATORS[name]()
    found = evaluator(engine, output_path=str(tmp_path))
    expected = expected(minilm)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-5), key
    found.pop("sequential_score", None)  # which is no metric of its own
    assert engine.model_card_data.metrics.items() >= found.items()


@pytest.mark.parametrize("name", TEACHERS)
def test_evaluators_with_a_teacher(name: str, engine: Engine, minilm: Any, tmp_path: Path) -> None:
    found = engine.evaluate(TEACHERS[name](engine), str(tmp_path / "new" / "folder"))
    assert found == pytest.approx(minilm.evaluate(TEACHERS[name](minilm)), abs=1e-5)
    assert list((tmp_path / "new" / "folder").iterdir())


def test_label_accuracy(engine: Engine, minilm: Any, tmp_path: Path) -> None:
    """A softmax over pairs of vectors, with the same weights on both sides."""
    examples = [InputExample(texts=[left, right], label=i % 3) for i, (left, right, _) in enumerate(PAIRS)]
    heads = [losses.SoftmaxLoss(model, 384, num_labels=3) for model in (engine, minilm)]
    heads[0].classifier.load_state_dict(heads[1].classifier.state_dict())
    found, logits = [], []
    for model, head in zip((engine, minilm), heads, strict=True):
        loader: Any = DataLoader(examples, batch_size=2)  # type: ignore[arg-type]  # a list is a dataset
        evaluator = evaluation.LabelAccuracyEvaluator(loader, softmax_model=head)
        found.append(evaluator(model, output_path=str(tmp_path)))
        with torch.no_grad():
            logits.append(head(model.smart_batching_collate(examples)[0], labels=None)[1])
    assert found[0] == found[1]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=0)
    assert engine.model_card_data.metrics.items() >= found[0].items()
    for kind in (np.float64, np.int64):
        arrays = [InputExample(texts=["a", "b"], label=np.ones(2, kind)) for _ in range(3)]
        (_, ours), (_, theirs) = (model.smart_batching_collate(arrays) for model in (engine, minilm))
        torch.testing.assert_close(ours, theirs)


def test_a_loss_does_not_train(engine: Engine) -> None:
    """Not its head either: the vectors would silently stay as they are."""
    features, labels = engine.smart_batching_collate([InputExample(texts=["a", "b"], label=1)])
    with pytest.raises(EngineError, match="no gradients"):
        losses.SoftmaxLoss(engine, 384, num_labels=3)(features, labels)


def test_nano_beir(engine: Engine, minilm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subsets = {
        "corpus": [{"_id": key, "text": text} for key, text in CORPUS.items()],
        "queries": [{"_id": str(key), "text": text} for key, text in QUERIES.items()],
        "qrels": [{"query-id": str(key), "corpus-id": f"d{key}"} for key in QUERIES],
    }
    kind = evaluation.NanoBEIREvaluator  # its datasets would come from the hub
    monkeypatch.setattr(kind, "_load_dataset_subset_split", lambda self, subset, **_: subsets[subset])
    found, expected = (kind(dataset_names=["msmarco"])(model) for model in (engine, minilm))
    assert found == pytest.approx(expected, abs=1e-5)


HARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "faiss": {"use_faiss": True},
    "processes": {"use_multi_process": True},
    "margins": {"absolute_margin": 0.05, "max_score": 0.9, "range_min": 1},
}


@pytest.mark.parametrize("name", HARD)
def test_hard_negatives(name: str, engine: Engine, minilm: Any, tmp_path: Path) -> None:
    from datasets import Dataset

    dataset = Dataset.from_dict({"query": LEFT, "answer": RIGHT})
    options = {"range_max": 3, "num_negatives": 1, "verbose": False, "corpus": [*RIGHT, *TEXTS], **HARD[name]}
    # Upstream's own processes would take half a minute to start.
    expected = util.mine_hard_negatives(dataset, minilm, **{**options, "use_multi_process": False})
    for _ in range(2):  # the second time from the cache
        found = util.mine_hard_negatives(dataset, engine, cache_folder=str(tmp_path), **options)
        assert found.to_list() == expected.to_list()
    assert len(list(tmp_path.iterdir())) == 2


def test_an_extractive_summary(engine: Engine, minilm: Any) -> None:
    """The calls of sentence-transformers' example of LexRank."""

    def central(model: Any) -> list[int]:
        scores = model.similarity(*[model.encode(LEFT + RIGHT)] * 2).numpy()
        transition = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        return list(np.argsort(-np.linalg.matrix_power(transition, 64)[0]))

    assert central(engine) == central(minilm)


def test_paraphrase_mining(engine: Engine, minilm: Any) -> None:
    texts = [*LEFT, *RIGHT, *TEXTS]
    found, expected = util.paraphrase_mining(engine, texts), util.paraphrase_mining(minilm, texts)
    assert [pair[1:] for pair in found[:20]] == [pair[1:] for pair in expected[:20]]
    np.testing.assert_allclose([pair[0] for pair in found], [pair[0] for pair in expected], atol=1e-5)


def test_semantic_search(engine: Engine, minilm: Any) -> None:
    def hits(model: Any, **options: Any) -> list[list[int]]:
        corpus, queries = (model.encode(texts, **options) for texts in (list(CORPUS.values()), LEFT))
        return [[hit["corpus_id"] for hit in row] for row in util.semantic_search(queries, corpus, top_k=5)]

    assert hits(engine) == hits(engine, convert_to_tensor=True) == hits(minilm)
    assert hits(engine)[1][0] == 1  # the kitten naps


def test_community_detection(engine: Engine) -> None:
    texts = [
        *TEXTS,
        "Two little dogs chase a red ball over the frozen pond.",
        "Small dogs run after a ball on the ice.",
    ]
    clusters = util.community_detection(
        engine.encode(texts, convert_to_tensor=True), threshold=0.6, min_community_size=3, show_progress_bar=False
    )
    assert [sorted(cluster) for cluster in clusters] == [[3, 12, 13]]


def test_the_similarity_function_can_be_chosen(small: Engine, small_reference: Any) -> None:
    assert small.similarity_fn_name == small_reference.similarity_fn_name == "dot"
    a, b = small.encode(TEXTS[:5]), small.encode(TEXTS[5:])
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        for given in (name, SimilarityFunction(name)):
            small.similarity_fn_name = given
            assert small.similarity_fn_name == name
        expected = SimilarityFunction.to_similarity_fn(name)(a, b)
        np.testing.assert_allclose(small.similarity(a, b), expected, atol=1e-4, rtol=1e-5)
    with pytest.raises(ValueError, match="one of cosine, dot, euclidean, manhattan, got 'hamming'"):
        small.similarity_fn_name = "hamming"
    assert small.similarity_fn_name == "manhattan"
