"""Evaluation tasks: they give texts, block by block, and turn vectors into measures.

Blocks are small, so that memory does not grow with the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.quality.beir import Retrieval
from sbert_infer.bench.quality.labelled_pairs import LabelledPairs
from sbert_infer.bench.quality.metrics import average_precision, ndcg, recall, reciprocal_rank
from sbert_infer.bench.quality.search import Nearest
from sbert_infer.bench.stats import cosines, spearman
from sbert_infer.types import Text

Vectors = npt.NDArray[Any]
Measures = dict[str, float]

SPEARMAN, AP = "Spearman", "AP"
_BLOCK_PAIRS = 4096
_BLOCK_TEXTS = 8192
_FOUND = 100  # documents to find per query


@dataclass(frozen=True)
class Block:
    """Texts to encode. `role` is their role in a search; `keys` are for the scorer."""

    texts: Sequence[Text]
    keys: Any
    role: str = ""  # "query" or "document"


@dataclass(frozen=True)
class PairTask:
    """Cosines of pairs against human judgement, by rank correlation or average precision.

    For rerankers, which score pairs `together`, their scores take the place of cosines.
    """

    data: LabelledPairs
    measure: str
    together: bool = False

    def describe(self) -> str:
        """Describe the number of pairs."""
        return f"{self.data.name}: {len(self.data.values):,} pairs"

    def blocks(self) -> Iterator[Block]:
        """Yield pairs, each within one block; a text repeated in a block is encoded once."""
        for start in range(0, len(self.data.values), _BLOCK_PAIRS):
            left, right = (side[start : start + _BLOCK_PAIRS] for side in (self.data.left, self.data.right))
            if self.together:
                yield Block(list(zip(left, right, strict=True)), None)
                continue
            places = {text: place for place, text in enumerate(dict.fromkeys([*left, *right]))}
            yield Block(list(places), ([places[text] for text in left], [places[text] for text in right]))

    def scorer(self) -> PairScorer:
        """Make a scorer for one contestant."""
        return PairScorer(self)


class PairScorer:
    """Measures the quality of one contestant's vectors or scores of pairs."""

    def __init__(self, task: PairTask) -> None:
        self._task = task
        self._found: list[npt.NDArray[np.float64]] = []

    def add(self, block: Block, vectors: Vectors) -> None:
        """Take the vectors of a block, each block once and in order."""
        if self._task.together:
            self._found.append(vectors[:, 0].astype(np.float64))
        else:
            left, right = block.keys
            self._found.append(cosines(vectors[left], vectors[right]))

    def measures(self) -> Measures:
        """Compute the measures, after the last block."""
        found, values = np.concatenate(self._found), self._task.data.values
        value = spearman(found, values) if self._task.measure == SPEARMAN else average_precision(values, found)
        return {f"{self._task.data.name} {self._task.measure}": value}


@dataclass(frozen=True)
class RetrievalTask:
    """Search the whole corpus for every query, by the model's own similarity."""

    data: Retrieval
    similarity: str

    def describe(self) -> str:
        """Describe the number of queries."""
        return f"{self.data.name}: {len(self.data.queries):,} queries"

    def blocks(self) -> Iterator[Block]:
        """Yield the queries, then the documents."""
        queries = iter(self.data.queries.items())
        yield from _blocks(queries, "query")
        yield from _blocks(self.data.documents(), "document")

    def scorer(self) -> RetrievalScorer:
        """Make a scorer for one contestant."""
        return RetrievalScorer(self)


class RetrievalScorer:
    """Measures the quality of one contestant's vectors of queries and documents."""

    def __init__(self, task: RetrievalTask) -> None:
        self._task = task
        self._queries: list[Vectors] = []
        self._nearest: Nearest | None = None

    def add(self, block: Block, vectors: Vectors) -> None:
        """Take the vectors of a block, each block once and in order."""
        if block.role == "query":
            self._queries.append(vectors)
            return
        if self._nearest is None:  # one more than needed: a query may be among the documents
            self._nearest = Nearest(np.concatenate(self._queries), _FOUND + 1, self._task.similarity)
        self._nearest.add(block.keys, vectors)

    def measures(self) -> Measures:
        """Compute the measures, after the last block."""
        data = self._task.data
        rows = [self._measures_of(row, query, data.grades[query]) for row, query in enumerate(data.queries)]
        return {f"{data.name} {name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def _measures_of(self, row: int, query: str, grades: dict[str, int]) -> Measures:
        found = self._nearest.found[row] if self._nearest else []
        documents = dict.fromkeys(document for _, document in found if document != query)  # an id may occur twice
        ranked = [grades.get(document, 0) for document in documents][:_FOUND]
        judged = list(grades.values())
        return {
            "nDCG@10": ndcg(ranked, judged, 10),
            "recall@10": recall(ranked, judged, 10),
            "recall@100": recall(ranked, judged, 100),
            "MRR@10": reciprocal_rank(ranked, 10),
        }


Task = PairTask | RetrievalTask
Scorer = PairScorer | RetrievalScorer


def _blocks(texts: Iterator[tuple[str, str]], role: str) -> Iterator[Block]:
    while rows := list(islice(texts, _BLOCK_TEXTS)):
        yield Block([text for _, text in rows], [key for key, _ in rows], role)
