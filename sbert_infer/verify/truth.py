"""The right vectors of texts: those of an artifact whose canaries were right on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.fingerprint import Fingerprint
from sbert_infer.artifact.manifest import TOKENS
from sbert_infer.encode.open_pipeline import load_tokenizer
from sbert_infer.encode.self_check import bounds_of
from sbert_infer.engine import Engine

Array = npt.NDArray[np.float32]

POOLINGS = ("mean", "cls", "max", "lasttoken")


@dataclass(frozen=True)
class Made:
    """How the vectors to compare are said to have been made."""

    prompt: str  # that stood before each text
    normalize: bool = False
    truncate_dim: int | None = None


@dataclass(frozen=True)
class Stated:
    """The fingerprint that a server or a file says its vectors have; its parts if known."""

    exact: str
    parts: Fingerprint | None

    def compared(self, own: Fingerprint) -> dict[str, Any]:
        """Return it, whether it is that of the artifact, and the parts that differ."""
        differences = [] if self.parts is None else own.differences(self.parts)
        return {"exact": self.exact, "same": self.exact == own.exact, "differences": differences}


class Truth:
    """Encodes texts as they should have been, or as they may have been by mistake."""

    def __init__(self, engine: Engine, made: Made, min_cosine: float | None = None) -> None:
        self.engine, self.made = engine, made
        self.bound = bounds_of(engine.manifest, engine.device)[0] if min_cosine is None else min_cosine
        self._tokenizer = load_tokenizer(engine.artifact).backend
        self._tokenizer.no_truncation()

    @property
    def limit(self) -> int:
        """Tokens that the model takes."""
        return self.engine.manifest.max_length

    def count_tokens(self, text: str) -> int:
        """Return the tokens of `text` with its prompt, before it is cut."""
        return len(self._tokenizer.encode(self.made.prompt + text).ids)

    def encode(self, texts: Sequence[str], *, prompt: str | None = None, limit: int | None = None) -> Array:
        """Return the vectors of `texts`, with another prompt or cut to another limit if given."""
        engine, made = self.engine, self.made
        before = engine.max_seq_length
        if limit is not None:
            engine.max_seq_length = limit
        try:
            vectors: Array = engine.encode(
                list(texts),
                prompt=made.prompt if prompt is None else prompt,
                normalize_embeddings=made.normalize,
                truncate_dim=made.truncate_dim,
            )
            return vectors
        finally:
            if limit is not None:
                engine.max_seq_length = before

    @property
    def can_pool(self) -> bool:
        """Whether the vectors of other poolings can be made: only with an output for tokens."""
        return TOKENS in self.engine.pipeline.backend.outputs and not self.engine.manifest.head

    def pooled(self, texts: Sequence[str], pooling: str) -> Array:
        """Return the vectors of another one of `POOLINGS`."""
        each = self.engine.token_vectors(texts, self.made.prompt)
        return np.stack([_pool(tokens, pooling) for tokens in each])[:, : self.made.truncate_dim]


def _pool(tokens: Array, pooling: str) -> Array:
    """Return one vector for the token vectors [tokens, dim]."""
    pooled: Array
    if pooling in ("cls", "lasttoken"):
        pooled = tokens[0 if pooling == "cls" else -1]
    else:
        pooled = tokens.mean(axis=0) if pooling == "mean" else tokens.max(axis=0)
    return pooled
