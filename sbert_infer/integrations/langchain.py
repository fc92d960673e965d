"""Embeddings for LangChain: `SbertEmbeddings("model.onnx")`."""

from __future__ import annotations

from typing import Any

from sbert_infer.integrations.opening import Model, missing, open_engine

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise missing(error, "langchain-core") from error


class SbertEmbeddings(Embeddings):
    """Embeds with an `Engine`, or with what one opens, and its keyword options.

    Queries and documents have the model's own prompts. The asynchronous methods run in a thread,
    as LangChain has it; an engine may be used from many.
    """

    def __init__(self, model: Model, **options: Any) -> None:
        self.engine = open_engine(model, options)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents."""
        vectors: list[list[float]] = self.engine.encode_document(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Embed a query."""
        vector: list[float] = self.engine.encode_query(text).tolist()
        return vector
