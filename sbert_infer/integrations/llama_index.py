"""An embedding for LlamaIndex: `SbertEmbedding("model.onnx")`."""

from __future__ import annotations

import asyncio
from typing import Any

from sbert_infer.engine import Engine
from sbert_infer.integrations.opening import Model, missing, open_engine, written_down

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
except ImportError as error:
    raise missing(error, "llama-index-core") from error


class SbertEmbedding(BaseEmbedding):
    """Embeds with an `Engine`, or with what one opens and `options`, its keyword options.

    Queries and documents have the model's own prompts. Other arguments are LlamaIndex's. The
    asynchronous methods run in a thread.
    """

    options: dict[str, Any] = Field(default_factory=dict, description="Keyword options of Engine.")
    # The most that LlamaIndex allows: it passes on this many texts, and the engine cuts batches.
    embed_batch_size: int = Field(default=2048, description="How many texts come at a time.", gt=0, le=2048)
    _engine: Engine = PrivateAttr()

    def __init__(self, model_name: Model, **fields: Any) -> None:
        engine = open_engine(model_name, fields.get("options") or {})
        # What is made of the dictionary of a given engine must not open another one in its place.
        name = "an open engine" if isinstance(model_name, Engine) else written_down(model_name)
        super().__init__(model_name=name, **fields)
        self._engine = engine

    @classmethod
    def class_name(cls) -> str:
        """Return the name in LlamaIndex's dictionaries."""
        return "SbertEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._engine.encode_query(query).tolist()
        return vector

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._engine.encode_document(texts).tolist()
        return vectors

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
