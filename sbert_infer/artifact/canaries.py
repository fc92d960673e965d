"""Canaries: texts stored in an artifact with what the eager model gives for them in FP32.

They travel in the manifest, so every kind of artifact has them, and a runtime anywhere can see
whether its own vectors are right. The numbers are stored in 16 bits, after division by the largest
of them; vectors that are mostly zeros, with the places of the others.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import Artifact
from sbert_infer.errors import CorruptError
from sbert_infer.types import Pair, Text

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Canaries:
    """Texts, or pairs of texts, and the eager model's FP32 result for each of them."""

    texts: Sequence[Text]
    results: Sequence[Array]  # each [rows, dim]; one row, but for a multi-vector encoder
    tasks: Sequence[str | None] = ()  # of a multi-vector encoder: the role of each text

    def to_json(self) -> dict[str, Any]:
        """Return values that JSON can hold, for `Manifest.canaries`."""
        flat = np.concatenate([result.ravel() for result in self.results])
        scale = float(np.abs(flat).max(initial=0)) or 1.0
        entries: dict[str, Any] = {
            "texts": [text if isinstance(text, str) else list(text) for text in self.texts],
            "shapes": [list(result.shape) for result in self.results],
            "scale": scale,
        }
        if any(self.tasks):
            entries["tasks"] = list(self.tasks)
        places = np.flatnonzero(flat)
        if len(places) < len(flat) // 4:
            entries["places"] = _pack(places.astype("<u4"))
            flat = flat[places]
        return {**entries, "values": _pack((flat / scale).astype("<f2"))}

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Canaries:
        """Read what `to_json` returned; damage raises `ValueError`, `KeyError` or `TypeError`."""
        shapes = [(int(rows), int(dim)) for rows, dim in entries["shapes"]]
        sizes = [rows * dim for rows, dim in shapes]
        values = np.frombuffer(_unpack(entries["values"]), "<f2").astype(np.float32) * np.float32(
            float(entries["scale"])
        )
        if "places" in entries:
            flat = np.zeros(sum(sizes), np.float32)
            flat[np.frombuffer(_unpack(entries["places"]), "<u4")] = values
            values = flat
        parts = np.split(values, np.cumsum(sizes)[:-1])
        results = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        texts = [text if isinstance(text, str) else _pair(text) for text in entries["texts"]]
        tasks = list(entries.get("tasks", [None] * len(texts)))
        if not len(texts) == len(results) == len(tasks):
            raise ValueError(f"{len(texts)} texts, {len(results)} results and {len(tasks)} tasks")
        return cls(texts, results, tasks)


def canaries_of(artifact: Artifact) -> Canaries | None:
    """Return the canaries of an artifact; None for one of an older export."""
    entries = artifact.manifest.canaries
    if entries is None:
        return None
    try:
        return Canaries.from_json(entries)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CorruptError(f"{artifact.path}: its canaries can't be read ({error}); export it again") from error


def _pair(texts: Sequence[str]) -> Pair:
    first, second = texts
    return first, second


def _pack(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _unpack(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
