"""Cohere's embeddings: /v2/embed and /v1/embed."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.artifact.manifest import ENCODER
from sbert_infer.serve.http.body import decode
from sbert_infer.serve.http.caller import may_wait
from sbert_infer.serve.http.operation import COHERE, Operation, model_operation
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.routes.handle import (
    DenseOptions,
    check_type,
    cut_at,
    encode,
    has_unit_length,
    prompt_for,
    truncation,
    truncation_headers,
    whole,
)
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.cohere import ApiVersion, Billed, CohereEmbeddings, CohereEmbedRequest, CohereMeta
from sbert_infer.serve.wire.responses import json_array, json_response
from sbert_infer.serve.wire.schemas import VectorType
from sbert_infer.serve.wire.vectors import rows_of
from sbert_infer.types import Encoded


class Cohere:
    """The handlers of these routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        return [
            model_operation(
                path,
                "Embed texts",
                handler,
                CohereEmbeddings,
                (CohereEmbedRequest,),
                tag=COHERE,
                example={
                    "texts": ["A cat sat."],
                    "input_type": "search_document",
                    "embedding_types": ["float"],
                },
                note="Long texts are cut at their end, unless `truncate` says otherwise.",
            )
            for path, handler in (("/v2/embed", self.embed), ("/v1/embed", self.embed_v1))
        ]

    async def embed(self, request: Request, body: bytes) -> Response:
        """Embed texts, and respond with vectors by type."""
        asked = decode(body, CohereEmbedRequest)
        encoded = await self._encode(request, asked)
        by_type = {name: await _array(encoded, name) for name in dict.fromkeys(asked.embedding_types or ["float"])}
        content = CohereEmbeddings(record_of(request).id, by_type, asked.texts, _meta(encoded, "2"))  # type: ignore[arg-type]
        return json_response(content, truncation_headers(encoded))

    async def embed_v1(self, request: Request, body: bytes) -> Response:
        """Embed texts; without `embedding_types`, respond with a plain list of vectors."""
        asked = decode(body, CohereEmbedRequest)
        encoded, types = await self._encode(request, asked), asked.embedding_types
        vectors = {name: await _array(encoded, name) for name in types} if types else await _array(encoded, "float")
        content = CohereEmbeddings(
            record_of(request).id,
            vectors,  # type: ignore[arg-type]  # encoded already
            asked.texts,
            _meta(encoded, "1"),
            "embeddings_by_type" if types else "embeddings_floats",
        )
        return json_response(content, truncation_headers(encoded))

    async def _encode(self, request: Request, asked: CohereEmbedRequest) -> Encoded:
        may_wait(request, asked.priority)
        model, dim = self._models.find(asked.model, ENCODER), whole(asked.output_dimension)
        unit = has_unit_length(model, dim)
        for name in asked.embedding_types or []:
            check_type("float" if name == "base64" else name, model, unit=unit)
        cut = cut_at(model, max_tokens=asked.max_tokens) if asked.truncate is None else asked.truncate
        options = DenseOptions(normalize_embeddings=unit, truncate_dim=dim, **truncation(self._settings, cut, cut=True))
        prompt_name = prompt_for(model, input_type=asked.input_type)
        return await encode(request, model, asked.texts, prompt_name, options)


async def _array(encoded: Encoded, name: str) -> object:
    """All vectors in one type, as JSON."""
    kind: VectorType = "float" if name == "base64" else name  # type: ignore[assignment]  # the request was decoded
    rows = rows_of(kind, name == "base64")
    return await json_array(encoded.vectors, lambda start, vectors: rows(vectors))


def _meta(encoded: Encoded, version: str) -> CohereMeta:
    return CohereMeta(ApiVersion(version), Billed(input_tokens=encoded.tokens))
