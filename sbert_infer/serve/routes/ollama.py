"""Ollama's embeddings: /api/embed and the older /api/embeddings."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.serve.http.body import decode
from sbert_infer.serve.http.operation import OLLAMA, Operation, model_operation
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.routes.handle import DenseOptions, encode, truncation, truncation_headers, whole
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.ollama import OllamaEmbedding, OllamaEmbeddings, OllamaEmbedRequest, OllamaPromptRequest
from sbert_infer.serve.wire.responses import as_numbers, json_array, json_response


class Ollama:
    """The handlers of these routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        name = self._models.first.name
        return [
            model_operation(
                "/api/embed",
                "Embed texts",
                self.embed,
                OllamaEmbeddings,
                (OllamaEmbedRequest,),
                tag=OLLAMA,
                example={"model": name, "input": ["A cat sat."]},
                note="Vectors have length 1. Long texts are cut unless `truncate` is false.",
            ),
            model_operation(
                "/api/embeddings",
                "Embed one text",
                self.embed_prompt,
                OllamaEmbedding,
                (OllamaPromptRequest,),
                tag=OLLAMA,
                example={"model": name, "prompt": "A cat sat."},
                note="The older form: one vector, of the length that the model gives it.",
            ),
        ]

    async def embed(self, request: Request, body: bytes) -> Response:
        """Embed texts."""
        asked = decode(body, OllamaEmbedRequest)
        cut = truncation(self._settings, asked.truncate, cut=True)
        options = DenseOptions(normalize_embeddings=True, truncate_dim=whole(asked.dimensions), **cut)
        encoded = await encode(request, self._model(asked.model), asked.input, None, options)
        rows = await json_array(encoded.vectors, lambda start, vectors: list(as_numbers(vectors)))
        nanoseconds = int((time.monotonic() - record_of(request).start) * 1e9)
        content = OllamaEmbeddings(asked.model, rows, nanoseconds, encoded.tokens)  # type: ignore[arg-type]
        return json_response(content, truncation_headers(encoded))

    async def embed_prompt(self, request: Request, body: bytes) -> Response:
        """Embed one text."""
        asked = decode(body, OllamaPromptRequest)
        cut = truncation(self._settings, None, cut=True)
        options = DenseOptions(normalize_embeddings=False, truncate_dim=None, **cut)
        encoded = await encode(request, self._model(asked.model), asked.prompt, None, options)
        return json_response(OllamaEmbedding(as_numbers(encoded.vectors)[0]), truncation_headers(encoded))

    def _model(self, name: str) -> Model:
        """The model of this name, to which Ollama's clients may add its default tag."""
        return self._models.get(name.removesuffix(":latest"))
