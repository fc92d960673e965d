"""The types of number that a client may ask vectors in, each as JSON numbers or as base64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.encode.precision import reduce_precision
from sbert_infer.serve.wire.responses import Vectors, as_numbers
from sbert_infer.serve.wire.schemas import VectorType

Rows = Callable[[Vectors], list[Any]]  # vectors [texts, dim] to one value each, ready for the JSON encoder

_WIDEST = 8.0  # standard deviations of a number in a unit vector, beyond which 8 bits are cut off


def rows_of(kind: VectorType, packed: bool) -> Rows:
    """Make the function that turns vectors into lists of numbers, or into bytes if `packed`.

    The JSON encoder writes bytes as base64.
    """
    if kind == "float" and not packed:
        return as_numbers
    if packed:
        return lambda vectors: [row.tobytes() for row in convert(vectors, kind)]
    return lambda vectors: convert(vectors, kind).tolist()


def convert(vectors: Vectors, kind: VectorType) -> npt.NDArray[Any]:
    """Convert [n, dim] float32 to another type; bits are packed as sentence-transformers does.

    For 8 bits the vectors must have length 1. A vector's bytes depend on no other vector: all share
    the range of ±`eight_bit_range`, so that products of the bytes rank as those of the vectors do.
    """
    if kind == "float":
        return np.ascontiguousarray(vectors, dtype="<f4")
    if kind in ("binary", "ubinary"):
        return np.ascontiguousarray(reduce_precision(vectors, kind))
    scaled = np.rint(vectors * (127 / eight_bit_range(vectors.shape[1])))
    levels: npt.NDArray[np.int8] = np.clip(scaled, -127, 127).astype(np.int8)
    # Flipping the sign bit adds 128.
    return levels if kind == "int8" else levels.view(np.uint8) ^ np.uint8(128)


def eight_bit_range(dim: int) -> float:
    """The number that becomes 127: eight times what a number of a unit vector usually is, or 1."""
    return min(1.0, _WIDEST / math.sqrt(dim))
