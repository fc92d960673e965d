"""The parity certificate of a sparse encoder: that of dense vectors, and the active dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sbert_infer.export.options import Progress
from sbert_infer.export.verify.candidate import SparseCandidate
from sbert_infer.export.verify.parity import Bounds, Certificate, Expected, compare, refusing_failures

_MAX_NUMBERS = 2**26  # of all compared vectors, which are dense here: 256 MB, several times
_EVERY = 8  # the active dimensions of one text in so many are counted


@dataclass(frozen=True)
class SparseCertificate(Certificate):
    """As for dense vectors, over all numbers from the graph, regardless of `max_active_dims`."""

    active_dims: float  # of a text, on average
    active_overlap: float  # mean share of dimensions active in both vectors among those active in either


def some_texts(texts: Sequence[str], dim: int) -> list[str]:
    """As many of `texts` as can be compared, evenly spaced."""
    return list(texts[:: max(1, -(-len(texts) * dim // _MAX_NUMBERS))])


def certify_sparse(path: Path, expected: Expected, bounds: Bounds, progress: Progress) -> SparseCertificate:
    """Compare the artifact at `path` with the reference's vectors; raises as `certify` does."""
    with refusing_failures(), closing(SparseCandidate(path, threads=1)) as candidate:
        certificate = compare(candidate, expected, bounds, progress)
        ours, right = candidate.encode(expected.texts[::_EVERY]) != 0, expected.vectors[::_EVERY] != 0
    shared = (ours & right).sum(axis=1) / np.maximum((ours | right).sum(axis=1), 1)
    overlap = np.where((ours | right).any(axis=1), shared, 1.0).mean()
    return SparseCertificate(
        **asdict(certificate), active_dims=float(right.sum(axis=1).mean()), active_overlap=float(overlap)
    )
