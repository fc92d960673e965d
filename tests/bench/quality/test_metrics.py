"""Measures of quality, against scikit-learn, trec_eval if installed, and their definitions."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.bench.quality.metrics import average_precision, ndcg, recall, reciprocal_rank
from sbert_infer.bench.quality.search import Nearest

# Imported here: a first import takes longer than an example may.
sklearn_metrics: Any = importlib.import_module("sklearn.metrics")
trec: Any = importlib.import_module("pytrec_eval") if importlib.util.find_spec("pytrec_eval") else None

LABELLED = st.lists(st.tuples(st.integers(0, 1), st.integers(-4, 4)), min_size=1, max_size=40)
GRADES = st.lists(st.integers(-1, 3), max_size=15)


@given(LABELLED)
def test_average_precision_is_that_of_scikit_learn(rows: list[tuple[int, int]]) -> None:
    labels, scores = [float(label) for label, _ in rows], [score / 4 for _, score in rows]
    expected = sklearn_metrics.average_precision_score(labels, scores) if any(labels) else 0
    assert average_precision(labels, scores) == pytest.approx(expected)


@given(GRADES, GRADES, st.integers(1, 12))
def test_ranking_measures_follow_their_definitions(ranked: list[int], missed: list[int], k: int) -> None:
    judged = ranked + missed

    def gain(grades: list[int]) -> float:
        return sum(max(grade, 0) / math.log2(rank + 1) for rank, grade in enumerate(grades[:k], 1))

    best = gain(sorted(judged, reverse=True))
    assert ndcg(ranked, judged, k) == pytest.approx(gain(ranked) / best if best else 0)
    relevant = [rank for rank, grade in enumerate(ranked, 1) if grade > 0]
    total = len(relevant) + sum(grade > 0 for grade in missed)
    assert recall(ranked, judged, k) == (sum(rank <= k for rank in relevant) / total if total else 0)
    assert reciprocal_rank(ranked, k) == (1 / relevant[0] if relevant and relevant[0] <= k else 0)


@given(st.permutations(range(12)), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_ndcg_is_that_of_scikit_learn(order: list[int], grades: list[int]) -> None:
    scores = [-order.index(place) for place in range(12)]
    expected = sklearn_metrics.ndcg_score([grades], [scores], k=5)
    assert ndcg([grades[place] for place in order], grades, 5) == pytest.approx(expected)


@pytest.mark.skipif(trec is None, reason="needs pytrec_eval, which comes with mteb")
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 999), st.integers(-1, 2)), min_size=1, max_size=30),
    st.integers(1, 7),
)
def test_search_and_measures_are_those_of_trec_eval(documents: list[tuple[int, int, int]], block: int) -> None:
    """Many scores are equal here, and their order counts."""
    grades = {str(number): grade for _, number, grade in documents}
    scores = {str(number): float(score) for score, number, _ in documents}
    evaluator = trec.RelevanceEvaluator({"q": grades}, {"ndcg_cut.10", "recall.10"})
    expected = evaluator.evaluate({"q": scores})["q"]

    nearest = Nearest(np.ones((1, 1), np.float32), 10, "dot")
    ids = list(scores)
    for start in range(0, len(ids), block):
        some = ids[start : start + block]
        nearest.add(some, np.array([[scores[key]] for key in some], np.float32))
    ranked = [grades[key] for _, key in nearest.found[0]]
    assert ndcg(ranked, list(grades.values()), 10) == pytest.approx(expected["ndcg_cut_10"])
    assert recall(ranked, list(grades.values()), 10) == pytest.approx(expected["recall_10"])


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_blocks_find_what_one_sort_finds(count: int, k: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    queries, documents = (rng.integers(-2, 3, (rows, 2)).astype(np.float32) for rows in (3, count))
    ids = [f"d{number}" for number in rng.permutation(count)]
    nearest = Nearest(queries, k, "dot")
    for start in range(0, count, block):
        nearest.add(ids[start : start + block], documents[start : start + block])
    for row, query in enumerate(queries):
        everything = sorted(zip((documents @ query).tolist(), ids, strict=True), reverse=True)
        assert nearest.found[row] == everything[:k]
