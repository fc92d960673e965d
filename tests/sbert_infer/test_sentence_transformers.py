"""Utilities and evaluators of sentence-transformers accept an `Engine` instead of their model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SimilarityFunction, util
from sentence_transformers.sentence_transformer import evaluation

from sbert_infer import Engine
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
}


@pytest.mark.parametrize("name", EVALUATORS)
def test_evaluators(name: str, engine: Engine, minilm: Any, tmp_path: Path) -> None:
    evaluator, expected = EVALUATORS[name](), EVALUATORS[name]()
    found = evaluator(engine, output_path=str(tmp_path))
    expected = expected(minilm)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-5), key
    assert engine.model_card_data.metrics.items() >= found.items()


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
