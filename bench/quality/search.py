"""Exact search in blocks of documents, so that memory does not grow with the corpus."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.similarity import similarity

Vectors = npt.NDArray[Any]
Found = tuple[float, str]  # a document's score and id

_QUERIES = 256  # scored at once


class Nearest:
    """The `k` best documents of each query so far; of equal scores the greater id comes first.

    (That is trec_eval's order, and the one in which BEIR fills its heaps.)
    """

    def __init__(self, queries: Vectors, k: int, similarity_name: str) -> None:
        self._queries = queries
        self._k = k
        self._similarity = similarity_name
        self.found: list[list[Found]] = [[] for _ in queries]  # best first

    def add(self, ids: Sequence[str], vectors: Vectors) -> None:
        """Compare every query with a block of documents."""
        for start in range(0, len(self._queries), _QUERIES):
            scores = similarity(self._similarity, self._queries[start : start + _QUERIES], vectors)
            for row, found in enumerate(scores, start):
                candidates = [(float(found[place]), ids[place]) for place in _at_least(found, self._k)]
                self.found[row] = nlargest(self._k, [*self.found[row], *candidates])


def _at_least(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Indices of the `k` greatest scores, and of those equal to the last of them."""
    if len(scores) <= k:
        return np.arange(len(scores))
    return np.flatnonzero(scores >= np.partition(scores, -k)[-k])
