"""OpenAI's routes for embeddings and models, with what NIM, Jina, Voyage, vLLM and Azure add."""

from __future__ import annotations

from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.serve.http.body import read_body
from sbert_infer.serve.http.caller import caller_of, may_wait
from sbert_infer.serve.http.operation import OPENAI, Handler, Operation, model_operation
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.routes.handle import (
    DenseOptions,
    Inputs,
    any_truncation,
    check_type,
    decode_inputs,
    encode,
    has_unit_length,
    one_of,
    prompt_for,
    truncation_headers,
    whole,
)
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.openai import (
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    LenientEmbeddingRequest,
    LenientTokenEmbeddingRequest,
    ModelList,
    OpenAIModel,
    TextObject,
    TokenEmbeddingRequest,
    Usage,
)
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.responses import Vectors, json_array, json_response
from sbert_infer.serve.wire.schemas import VectorType
from sbert_infer.serve.wire.vectors import rows_of

_STRICT = EmbeddingRequest, TokenEmbeddingRequest
_LENIENT = LenientEmbeddingRequest, LenientTokenEmbeddingRequest
_DEPLOYMENT = "/openai/deployments/{name:path}/embeddings"


class OpenAI:
    """The handlers of these routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        kinds = 2 if self._settings.allow_token_ids else 1
        strict, lenient = _STRICT[:kinds], _LENIENT[:kinds]
        paths: dict[str, tuple[str, Handler, tuple[Any, ...]]] = {
            "/v1/embeddings": ("Embed texts", self.embeddings, strict),
            "/embeddings": ("The same as TEI has it: long texts are cut", self.tei_embeddings, lenient),
            _DEPLOYMENT: ("The same, as Azure has it", self.deployment, strict),
        }
        return [
            *(
                model_operation(
                    path,
                    summary,
                    handler,
                    EmbeddingList,
                    takes,
                    tag=OPENAI,
                    example={"input": ["A cat sat.", "A feline was sitting."], "model": self._models.first.name},
                    note="All texts or none: an input that can't be embedded is named by its index. Vectors have "
                    "length 1, unless the model was trained for another similarity than cosine and `dimensions` is "
                    "not given.",
                    problems=("token_ids_refused",),
                )
                for path, (summary, handler, takes) in paths.items()
            ),
            Operation("GET", "/v1/models", OPENAI, "List the models", self.list_models, ModelList),
            Operation(
                "GET",
                "/v1/models/{name:path}",
                OPENAI,
                "Look up a model",
                self.one_model,
                OpenAIModel,
                problems=("model_not_found",),
            ),
        ]

    async def embeddings(self, request: Request, body: bytes) -> Response:
        """Embed texts."""
        asked = decode_inputs(body, *_STRICT, self._settings.allow_token_ids)
        return await self._embed(request, asked, asked.model)

    async def tei_embeddings(self, request: Request, body: bytes) -> Response:
        """Embed texts, cut by default, and ignore unknown fields."""
        asked = decode_inputs(body, *_LENIENT, self._settings.allow_token_ids)
        return await self._embed(request, asked, asked.model, cut=True)

    async def deployment(self, request: Request) -> Response:
        """Embed texts with the model that the path names. The router leaves such paths to us."""
        self._models.check_room(**caller_of(request))
        asked = decode_inputs(await read_body(request, self._settings), *_STRICT, self._settings.allow_token_ids)
        return await self._embed(request, asked, request.path_params["name"])

    async def _embed(
        self,
        request: Request,
        asked: EmbeddingRequest | TokenEmbeddingRequest,
        name: str | None,
        *,
        cut: bool = False,
    ) -> Response:
        if asked.late_chunking:
            raise Problem("invalid_request", "late_chunking is not supported here: leave it out", param="late_chunking")
        may_wait(request, asked.priority)
        model, named_type = self._models.get_typed(name)
        types = {"input_type": asked.input_type, "task": asked.task, "model": named_type}
        prompt_name = prompt_for(model, asked.prompt_name, **types)
        dim = whole(one_of(dimensions=asked.dimensions, output_dimension=asked.output_dimension))
        unit = has_unit_length(model, dim) if asked.normalized is None else asked.normalized
        kind, packed = _form(asked)
        check_type(kind, model, unit=unit)
        truncation = any_truncation(asked, model, self._settings, cut=cut)
        options = DenseOptions(normalize_embeddings=unit, truncate_dim=dim, **truncation)
        inputs: Inputs = asked.input if isinstance(asked.input, str) else [*map(_plain, asked.input)]
        encoded = await encode(request, model, inputs, prompt_name, options)
        rows = rows_of(kind, packed)

        def items(start: int, vectors: Vectors) -> list[object]:
            return [Embedding(index, row) for index, row in enumerate(rows(vectors), start)]

        data, usage = await json_array(encoded.vectors, items), Usage(encoded.tokens, encoded.tokens)
        content = EmbeddingList(data, model.name, usage)  # type: ignore[arg-type]  # `data` is encoded already
        return json_response(content, truncation_headers(encoded))

    async def list_models(self, request: Request) -> Response:
        """List all models under all their names."""
        return json_response(ModelList([_entry(model, name) for model in self._models for name in model.names]))

    async def one_model(self, request: Request) -> Response:
        """Look up a model by its name."""
        name = request.path_params["name"]
        return json_response(_entry(self._models.get(name), name))


def _form(asked: EmbeddingRequest | TokenEmbeddingRequest) -> tuple[VectorType, bool]:
    """The type of the numbers, and whether they are sent as base64.

    As `encoding_format`, "float" means JSON's numbers, of whatever type the other fields name.
    """
    written, kind = asked.encoding_format, asked.embedding_type
    wanted = one_of(
        encoding_format=None if written in ("float", "base64") else written,
        embedding_type=None if kind == "base64" else kind,
        output_dtype=asked.output_dtype,
    )
    return cast("VectorType", wanted or "float"), "base64" in (written, kind)


def _plain(item: str | TextObject) -> str:
    return item.text if isinstance(item, TextObject) else item


def _entry(model: Model, name: str) -> OpenAIModel:
    return OpenAIModel(name, model.created, model.fingerprint.exact)
