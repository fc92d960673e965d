"""Embeddings in fewer bits, bit for bit as sentence-transformers makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.errors import warn

Vectors = npt.NDArray[np.float32]
PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")

_FEW = 100  # ranges learnt from fewer embeddings are unstable


def reduce_precision(
    vectors: Vectors, precision: str, ranges: tuple[Vectors, Vectors] | None = None
) -> npt.NDArray[Any]:
    """Convert [n, dim] float32 to [n, dim] int8 or uint8, or to [n, dim / 8] packed bits.

    `ranges`, for int8 and uint8, are the smallest and the largest value of each dimension; by
    default those of `vectors`.
    """
    if precision == "float32":
        return vectors
    if precision in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits - 128).astype(np.int8)
    return _to_256_steps(vectors, precision, ranges or _ranges(vectors, precision))


def _ranges(vectors: Vectors, precision: str) -> tuple[Vectors, Vectors]:
    if len(vectors) == 1:
        raise ValueError(f"precision={precision!r} needs several texts: its ranges are learnt from their embeddings")
    if len(vectors) < _FEW:
        warn(f"precision={precision!r}: ranges learnt from only {len(vectors)} embeddings are unstable")
    return vectors.min(axis=0), vectors.max(axis=0)


def _to_256_steps(vectors: Vectors, precision: str, ranges: tuple[Vectors, Vectors]) -> npt.NDArray[Any]:
    """Quantize each dimension in 256 steps between its smallest and its largest value."""
    low, high = ranges
    step = (high - low) / 255
    step = np.where(step == 0, 1, step)
    levels: npt.NDArray[np.float32] = np.clip(np.floor((vectors - low) / step), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)
