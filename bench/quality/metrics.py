"""Ranking metrics as the usual evaluation tools compute them. Pure functions.

A grade is how relevant a document is to a query, 0 if it is not or was not judged. `ranked` are the
grades of the documents found, best first; `judged` are all grades of a query.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["average_precision", "ndcg", "recall", "reciprocal_rank"]

Floats = npt.NDArray[np.float64]


def average_precision(labels: Sequence[float] | Floats, scores: Sequence[float] | Floats) -> float:
    """Average precision as in scikit-learn: equal scores share a rank. 0 without a label of 1."""
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    sorted_scores = np.asarray(scores, np.float64)[order]
    hits = np.cumsum(np.asarray(labels, np.float64)[order])
    if not len(hits) or not hits[-1]:
        return 0.0
    last = np.flatnonzero(np.append(np.diff(sorted_scores) != 0, True))  # of each group of equals
    precision, share = hits[last] / (last + 1), hits[last] / hits[-1]
    return float((np.diff(share, prepend=0.0) * precision).sum())


def ndcg(ranked: Sequence[int], judged: Sequence[int], k: int) -> float:
    """Discounted gain of the first `k` as a share of the best; gains are grades (trec_eval)."""
    best = _discounted_gain(sorted(judged, reverse=True)[:k])
    return _discounted_gain(ranked[:k]) / best if best else 0.0


def recall(ranked: Sequence[int], judged: Sequence[int], k: int) -> float:
    """Share of the relevant documents that are among the first `k`."""
    relevant = sum(grade > 0 for grade in judged)
    return sum(grade > 0 for grade in ranked[:k]) / relevant if relevant else 0.0


def reciprocal_rank(ranked: Sequence[int], k: int) -> float:
    """1 / rank of the first relevant document, 0 if it is not among the first `k`."""
    return next((1 / rank for rank, grade in enumerate(ranked[:k], 1) if grade > 0), 0.0)


def _discounted_gain(grades: Sequence[int]) -> float:
    gains = np.maximum(np.asarray(grades, np.float64), 0)  # a negative grade is no worse than none
    return float((gains / np.log2(np.arange(len(gains)) + 2)).sum())
