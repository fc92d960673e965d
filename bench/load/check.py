"""Whether the vectors in an answer are those of the texts in the request."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.stats import cosines

__all__ = ["count_wrong", "decode_answer"]

Vectors = npt.NDArray[np.float32]


def decode_answer(body: bytes) -> Vectors | None:
    """The vectors of an OpenAI answer in the order of the inputs, [texts, dim]; None if it is not such an answer."""
    try:
        entries = sorted(json.loads(body)["data"], key=lambda entry: int(entry["index"]))
        if [entry["index"] for entry in entries] != list(range(len(entries))):
            return None
        vectors = np.array([_decode_vector(entry["embedding"]) for entry in entries])
    except (ValueError, LookupError, TypeError):
        return None
    return vectors if vectors.ndim == 2 else None


def count_wrong(body: bytes, texts: Sequence[int], expected: Vectors, min_cosine: float) -> int:
    """How many of a request's texts, given as rows of `expected`, did not get their own vector."""
    vectors = decode_answer(body)
    if vectors is None or vectors.shape != (len(texts), expected.shape[1]):
        return len(texts)
    right = cosines(vectors, expected[list(texts)]) >= min_cosine  # NaN is not right
    return len(texts) - int(np.count_nonzero(right))


def _decode_vector(embedding: Any) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    return np.asarray(embedding, np.float32)
