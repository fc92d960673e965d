"""The arithmetic behind the figures. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

PERCENTILES = (50, 95, 99)

Floats = npt.NDArray[np.float64]


def paired_ratio(reference: Sequence[float], others: Sequence[float]) -> float:
    """Speed-up of `others`: the median of each round's ratio, so that slow spells cancel out."""
    return median([mine / other for mine, other in zip(reference, others, strict=True)])


def round_ratios(numerators: Sequence[float | None], denominators: Sequence[float | None]) -> list[float]:
    """Ratio of each round that has one. After Ctrl-C one side may be a round short."""
    pairs = zip(numerators, denominators, strict=False)
    return [above / below for above, below in pairs if above is not None and below]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99."""
    return {f"p{rank}": float(np.percentile(values, rank)) for rank in PERCENTILES}


def cosines(vectors: npt.NDArray[Any], reference: npt.NDArray[Any]) -> Floats:
    """Cosine of each row with the same row of the reference: NaN if a vector has NaN, 0 if zero."""
    a, b = vectors.astype(np.float64), reference.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    products: Floats = (a * b).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return np.clip(products, -1, 1)


def spearman(left: Sequence[float] | Floats, right: Sequence[float] | Floats) -> float:
    """Rank correlation; equal values share their mean rank. 0 if one side is constant."""
    return correlation(_ranks(np.asarray(left, np.float64)), _ranks(np.asarray(right, np.float64)))


def correlation(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> float:
    """Pearson's correlation. 0 if one side is constant."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / scale) if scale else 0.0


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)  # rank of the last of each group of equals
    ranks: Floats = (last - (counts - 1) / 2)[inverse]
    return ranks


def flops(lengths: npt.NDArray[np.int64], coefficients: Sequence[float]) -> float:
    """Operations for texts of these lengths without padding, by the polynomial c + a n + b n^2."""
    n = lengths.astype(np.float64)
    constant, linear, square = coefficients
    return float((constant + linear * n + square * n * n).sum())
