"""Hybrid output: dense, sparse and multi-vector output of one pass (bge-m3).

For artifacts exported with `--outputs sentence,sparse,multi`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import MULTI, SENTENCE, WEIGHTS, Manifest
from sbert_infer.backends.base import Array
from sbert_infer.encode.options import EncodeOptions
from sbert_infer.encode.output import Collector, Indices, Output, Window
from sbert_infer.encode.sparse import SparseRows
from sbert_infer.encode.tokens import TokenRows, reordered
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer


@dataclass(frozen=True)
class AllVectors:
    """The three kinds of vectors of bge-m3."""

    dense: Array  # [texts, dim]
    sparse: Any  # `scipy.sparse.csr_matrix` [texts, vocabulary]: the weights of a text's words
    multi: list[Array]  # for each text [tokens - 1, dim], without the first token; unit length


class HybridOutput(Output):
    """All three kinds of vectors; the dense ones are cut to `dim` numbers."""

    names = (SENTENCE, WEIGHTS, MULTI)

    def __init__(self, manifest: Manifest, dim: int, tokenizer: Tokenizer) -> None:
        if missing := [name for name in self.names if name not in manifest.outputs]:
            what = f"{manifest.name} has no {', '.join(missing)}"
            raise ValueError(f"{what}: export a checkpoint that has them with --outputs sentence,sparse,multi")
        self.width, self.dim, self.vocabulary = manifest.dim, dim, tokenizer.vocabulary
        self.padding_side = manifest.padding_side
        self.unweighted = np.array(manifest.unweighted_ids, np.int64)

    def collect(self, tokenized: TokenizedTexts) -> Collector:
        """Return an empty collector for these texts."""
        return _Rows(self, tokenized)

    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> AllVectors:
        """Return the vectors of all texts."""
        dense, sparse, multi = [np.empty((0, self.dim), np.float32)], [], []
        for window in windows:
            dense.append(window.vectors[0])
            sparse += window.vectors[1]
            multi += window.vectors[2]
        return AllVectors(np.concatenate(dense), SparseRows.of(sparse, self.vocabulary).to_csr(), multi)


class _Rows(Collector):
    def __init__(self, output: HybridOutput, tokenized: TokenizedTexts) -> None:
        self._output, self._own = output, TokenRows(tokenized, output.padding_side)
        count = len(tokenized.lengths)
        self._dense = np.empty((count, output.width), np.float32)
        self._sparse = SparseRows(count, output.vocabulary)
        self._multi: list[Array] = [np.empty((0, 0), np.float32)] * count

    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        bad = []
        for row, dense, weights, multi in zip(rows.tolist(), *found, strict=True):
            start, stop = self._own.tokenized.span(row)
            weights, multi = self._own(row, weights), self._own(row, multi)
            if not all(np.isfinite(part).all() for part in (dense, weights, multi)):
                bad.append(row)
            self._dense[row] = dense
            self._sparse.set(row, *self._heaviest(self._own.tokenized.ids[start:stop], weights))
            self._multi[row] = multi[1:].copy()
        return np.array(bad, np.int64)

    def result(self, order: Indices | None) -> tuple[Array, SparseRows, list[Array]]:
        dense = (self._dense if order is None else self._dense[order])[:, : self._output.dim]
        return dense, self._sparse.result(order), reordered(self._multi, order)

    def _heaviest(self, ids: Indices, weights: Array) -> tuple[npt.NDArray[np.int32], Array]:
        """Return the words of a text with the largest weight of each; only weights above zero."""
        kept = ~np.isin(ids, self._output.unweighted)
        words, which = np.unique(ids[kept], return_inverse=True)
        heaviest = np.zeros(len(words), np.float32)
        np.maximum.at(heaviest, which, weights[kept])
        active = heaviest > 0
        return words[active].astype(np.int32), heaviest[active]
