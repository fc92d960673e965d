"""Dense output: one vector for each text, or the scores of each pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sbert_infer.artifact.manifest import RERANKER, SCORES, SENTENCE, Manifest
from sbert_infer.backends.base import Array
from sbert_infer.encode.options import EncodeOptions
from sbert_infer.encode.output import Collector, Indices, Output, Window, not_finite
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.encode.results import to_torch
from sbert_infer.similarity import unit_rows
from sbert_infer.text.tokenizer import TokenizedTexts


class DenseOutput(Output):
    """The first `dim` numbers of each vector, scaled to length 1 if `normalize`."""

    def __init__(self, manifest: Manifest, dim: int | None = None, *, normalize: bool = False) -> None:
        self.names = (SCORES if manifest.kind == RERANKER else SENTENCE,)
        self.width, self.dim, self.normalize = manifest.dim, dim or manifest.dim, normalize

    @classmethod
    def of(cls, manifest: Manifest, options: EncodeOptions, dim: int) -> DenseOutput:
        """Return the output that `options` ask for; refuse an unsuitable `out`."""
        out: Any = options.out
        if out is not None and (options.precision != "float32" or not options.as_arrays):
            raise ValueError("out takes float32 vectors: leave precision, convert_to_numpy and convert_to_tensor alone")
        if out is not None and (out.ndim != 2 or out.shape[1] != dim or out.dtype != np.float32):
            raise ValueError(f"out must be float32 of shape [texts, {dim}], got {out.dtype} of {list(out.shape)}")
        return cls(manifest, dim, normalize=options.normalize_embeddings)

    def collect(self, tokenized: TokenizedTexts) -> Collector:
        """Return an empty collector for these texts."""
        return _Rows(self, len(tokenized.lengths))

    def finish(self, vectors: Array) -> Array:
        """Return what this output has of whole vectors, [texts, width]."""
        vectors = vectors[:, : self.dim]
        return unit_rows(vectors) if self.normalize else vectors

    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> Any:
        """Return an array [texts, dim], or the form that the options ask for."""
        if options.out is not None:
            return self.fill(options.out, windows)
        vectors = self.fill(np.empty((count, self.dim), np.float32), windows)
        result = reduce_precision(vectors, options.precision) if count else np.empty(0, np.float32)
        if not options.as_arrays:
            result = to_torch(result, as_list=not options.convert_to_tensor)
        return result[0] if single else result

    def fill(self, out: Array, windows: Iterator[Window]) -> Array:
        """Copy the windows into the rows of `out`; raise unless it has one row for each text."""
        filled = 0
        for window in windows:
            filled = window.start + len(window.vectors)
            if filled > len(out):
                raise ValueError(f"out has {len(out)} rows, but there are more texts")
            out[window.start : filled] = window.vectors
        if filled < len(out):
            raise ValueError(f"out has {len(out)} rows, but there were only {filled} texts")
        return out


class _Rows(Collector):
    def __init__(self, output: DenseOutput, count: int) -> None:
        self._output = output
        self._vectors = np.empty((count, output.width), np.float32)

    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        self._vectors[rows] = found[0]
        return not_finite(rows, found[0])

    def result(self, order: Indices | None) -> Array:
        return self._output.finish(self._vectors if order is None else self._vectors[order])
