"""OpenAI's routes: /v1/embeddings and /v1/models."""

from __future__ import annotations

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.serve.http.operation import Operation, model_operation
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.routes.handle import DenseOptions, decode_inputs, encode, truncation, truncation_headers, whole
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.responses import Vectors, as_numbers, json_array, json_response
from sbert_infer.serve.wire.schemas import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    ModelList,
    OpenAIModel,
    TokenEmbeddingRequest,
    Truncating,
    Usage,
)


class OpenAI:
    """The handlers of these routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        takes = (EmbeddingRequest, TokenEmbeddingRequest) if self._settings.allow_token_ids else (EmbeddingRequest,)
        return [
            model_operation(
                "/v1/embeddings",
                "Embed texts",
                self.embeddings,
                EmbeddingList,
                takes,
                example={"input": ["A cat sat.", "A feline was sitting."], "model": self._models.first.name},
                note="All texts or none: an input that can't be embedded is named by its index. Vectors have length 1, "
                "unless the model was trained for another similarity than cosine and `dimensions` is not given.",
                problems=("token_ids_refused",),
            ),
            Operation("GET", "/v1/models", "OpenAI", "List the models", self.list_models, ModelList),
            Operation(
                "GET",
                "/v1/models/{name:path}",
                "OpenAI",
                "Look up a model",
                self.one_model,
                OpenAIModel,
                problems=("model_not_found",),
            ),
        ]

    async def embeddings(self, request: Request, body: bytes) -> Response:
        """Embed texts."""
        asked = decode_inputs(body, EmbeddingRequest, TokenEmbeddingRequest, self._settings.allow_token_ids)
        model = self._models.get(asked.model)
        options = DenseOptions(
            normalize_embeddings=model.manifest.similarity == "cosine" or asked.dimensions is not None,
            truncate_dim=whole(asked.dimensions),
            **truncation(Truncating(), self._settings),  # OpenAI has no field for it
        )
        encoded = await encode(request, model, asked.input, asked.prompt_name, options)
        data = await json_array(encoded.vectors, _base64 if asked.encoding_format == "base64" else _numbers)
        usage = Usage(encoded.tokens, encoded.tokens)
        content = EmbeddingList(data, model.name, usage)  # type: ignore[arg-type]  # `data` is encoded already
        return json_response(content, truncation_headers(encoded))

    async def list_models(self, request: Request) -> Response:
        """List all models under all their names."""
        return json_response(ModelList([_entry(model, name) for model in self._models for name in model.names]))

    async def one_model(self, request: Request) -> Response:
        """Look up a model by its name."""
        name = request.path_params["name"]
        return json_response(_entry(self._models.get(name), name))


def _numbers(start: int, vectors: Vectors) -> list[object]:
    return [Embedding(index, numbers) for index, numbers in enumerate(as_numbers(vectors), start)]


def _base64(start: int, vectors: Vectors) -> list[object]:
    little = np.ascontiguousarray(vectors, dtype="<f4")
    # The encoder writes bytes as base64.
    return [Embedding(index, row.tobytes()) for index, row in enumerate(little, start)]


def _entry(model: Model, name: str) -> OpenAIModel:
    return OpenAIModel(name, model.created)
