"""Dense, sparse and multi-vector output in one pass, from artifacts exported with `--outputs sentence,sparse,multi`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import MULTI, SENTENCE, WEIGHTS, Manifest
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.encode.results import finish
from sbert_infer.encode.sparse import SparseRows
from sbert_infer.errors import EngineError, TextError, TruncationError
from sbert_infer.text.batching import Batch, plan_batches
from sbert_infer.text.tokenizer import TokenizedTexts

__all__ = ["AllVectors", "check_has_all", "encode_all"]

Array = npt.NDArray[np.float32]
_OUTPUTS = (SENTENCE, WEIGHTS, MULTI)


@dataclass(frozen=True)
class AllVectors:
    """What bge-m3 gives for each text."""

    dense: Array  # [texts, dim]
    sparse: Any  # `scipy.sparse.csr_matrix` [texts, vocabulary]: the weights of a text's words
    multi: list[Array]  # of each text: [its tokens without the first, dim], each of length 1


def check_has_all(manifest: Manifest) -> None:
    """Raise if the artifact gives no such vectors."""
    if missing := [name for name in _OUTPUTS if name not in manifest.outputs]:
        what = f"{manifest.name} has no {', '.join(missing)}"
        raise ValueError(f"{what}: export a checkpoint that has them with --outputs sentence,sparse,multi")


def encode_all(
    pipeline: Pipeline, manifest: Manifest, texts: Sequence[str], prompt: str, dim: int, *, allow_truncation: bool
) -> tuple[AllVectors, int]:
    """The vectors of `texts`, with `prompt` before each, and how many texts were cut. `dim`: of the dense ones."""
    backend = pipeline.backend
    if not hasattr(backend, "run_outputs"):
        raise EngineError(f"{backend.describe()} gives sentence vectors only: use Engine(..., device='cpu')")
    tokenized = pipeline.tokenizer([prompt + text for text in texts])
    if not allow_truncation and tokenized.truncated.any():
        first, limit = int(tokenized.truncated.argmax()), pipeline.tokenizer.max_length
        raise TruncationError(first, limit)
    skip = 0 if manifest.include_prompt else pipeline.tokenizer.prompt_length(prompt)
    into = _Rows(pipeline, manifest, tokenized, skip)
    batches = plan_batches(tokenized.lengths, backend.max_batch_tokens, edges=backend.edges)
    futures = [pipeline.submit(into.run, batch) for batch in batches]
    try:
        for future in futures:
            future.result()
    finally:
        wait([future for future in futures if not future.cancel()])
    dense = finish(into.dense, dim, normalize=False)
    return AllVectors(dense, into.sparse.to_csr(), into.multi), int(tokenized.truncated.sum())


class _Rows:
    """The vectors of texts, filled batch by batch, by any thread."""

    def __init__(self, pipeline: Pipeline, manifest: Manifest, tokenized: TokenizedTexts, prompt_length: int) -> None:
        self._pipeline, self._tokenized, self._prompt_length = pipeline, tokenized, prompt_length
        self._unweighted = np.array(manifest.unweighted_ids, np.int64)
        count = len(tokenized.lengths)
        self.dense = np.empty((count, manifest.dim), np.float32)
        self.sparse = SparseRows(count, pipeline.tokenizer.vocabulary)
        self.multi: list[Array] = [np.empty((0, 0), np.float32)] * count

    def run(self, batch: Batch) -> int:
        """Run a batch and keep its vectors."""
        ids, mask = self._pipeline.pad(self._tokenized, batch.rows, batch.length)
        backend = cast(Any, self._pipeline.backend)
        dense, weights, multi = backend.run_outputs(_OUTPUTS, ids, mask, self._prompt_length)
        self.dense[batch.rows] = dense
        for at, row in enumerate(batch.rows.tolist()):
            real = mask[at] == 1
            if not all(np.isfinite(part).all() for part in (dense[at], weights[at][real], multi[at][real])):
                raise TextError(f"text {row}: the model gives NaN or infinity", row, is_finite=False)
            self.sparse.put(row, *self._heaviest(ids[at][real], weights[at][real]))
            self.multi[row] = multi[at][real][1:].copy()
        return len(batch.rows)

    def _heaviest(self, ids: npt.NDArray[np.int64], weights: Array) -> tuple[npt.NDArray[np.int32], Array]:
        """Of each word the largest weight that one of its tokens has; only those above zero."""
        kept = ~np.isin(ids, self._unweighted)
        words, which = np.unique(ids[kept], return_inverse=True)
        heaviest = np.zeros(len(words), np.float32)
        np.maximum.at(heaviest, which, weights[kept])
        active = heaviest > 0
        return words[active].astype(np.int32), heaviest[active]
