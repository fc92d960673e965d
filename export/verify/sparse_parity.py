"""The parity certificate of a sparse encoder: that of dense vectors, and how many active dimensions are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sbert_infer.encode.sparse import SparseOutput, SparseRows
from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.parity import Certificate, cannot_run, compare, expect

__all__ = ["SparseCertificate", "certify_sparse", "some_texts"]

Vectors = npt.NDArray[np.float32]

_MAX_NUMBERS = 2**26  # of all vectors that are compared, which are dense for that: 256 MB, several times
_EVERY = 8  # texts whose active dimensions are counted


@dataclass(frozen=True)
class SparseCertificate(Certificate):
    """As for dense vectors, over all numbers that the graph gives: none is left out for `max_active_dims`."""

    active_dims: float  # of a text, on average
    active_overlap: float  # dimensions that are active in both vectors, of those active in either; the mean


def some_texts(texts: Sequence[str], dim: int) -> list[str]:
    """As many of `texts` as can be compared, from all over."""
    return list(texts[:: max(1, -(-len(texts) * dim // _MAX_NUMBERS))])


def certify_sparse(
    path: Path,
    reference: Reference,
    texts: Sequence[str],
    threshold: float,
    progress: Callable[[int], object] = lambda count: None,
) -> SparseCertificate:
    """Compare the artifact at `path` with `reference` on `texts`; raises as `certify` does."""
    expected = expect(reference, texts)
    try:
        with Engine(path, on_truncate="ignore", workers=1) as engine:
            candidate = _SparseCandidate(engine)
            certificate = compare(candidate, expected, threshold, progress)
            ours, right = candidate.encode(texts[::_EVERY]) != 0, expected.vectors[::_EVERY] != 0
    except EngineError as error:
        raise cannot_run(error) from error
    shared = (ours & right).sum(axis=1) / np.maximum((ours | right).sum(axis=1), 1)
    overlap = np.where((ours | right).any(axis=1), shared, 1.0).mean()
    return SparseCertificate(
        **asdict(certificate), active_dims=float(right.sum(axis=1).mean()), active_overlap=float(overlap)
    )


class _SparseCandidate:
    """An artifact in an open engine, its vectors dense."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def encode(self, texts: Sequence[str], prompt: str = "") -> Vectors:
        """As a user would."""
        manifest, pipeline = self._engine.manifest, self._engine.pipeline
        skip = 0 if manifest.include_prompt else pipeline.tokenizer.prompt_length(prompt)
        windows = pipeline.run(texts, SparseOutput(manifest, manifest.dim), prompt=prompt, prompt_length=skip)
        return SparseRows.of([row for window in windows for row in window.vectors], manifest.dim).to_dense()

    def run_together(self, texts: Sequence[str]) -> Vectors:
        """As a user never would."""
        return self._engine.pipeline.run_together(texts)
