"""Ollama's types for embeddings: /api/embed and the older /api/embeddings."""

from __future__ import annotations

from msgspec import Struct

from sbert_infer.serve.wire.schemas import Dimensions, ModelName, Texts, Truncate


class OllamaEmbedRequest(Struct):
    """Ollama's request. Its `options` and `keep_alive`, for models that it loads, are ignored."""

    model: ModelName
    input: str | Texts
    truncate: Truncate | None = None
    dimensions: Dimensions | None = None


class OllamaEmbeddings(Struct):
    """Vectors of length 1, and times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OllamaPromptRequest(Struct):
    """Ollama's older request, for one text."""

    model: ModelName
    prompt: str


class OllamaEmbedding(Struct):
    """One vector, as long as the model gives it."""

    embedding: list[float]
