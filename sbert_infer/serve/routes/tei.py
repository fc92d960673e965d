"""The routes of text-embeddings-inference: /embed, /similarity, /tokenize, /info and POST /."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sbert_infer import __version__
from sbert_infer.artifact.manifest import ENCODER, RERANKER
from sbert_infer.serve.http.body import decode, read_body, while_connected
from sbert_infer.serve.http.operation import READS, RUNS, Operation
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import EncodeOptions, Model
from sbert_infer.serve.routes.cards import card_of
from sbert_infer.serve.routes.handle import check_sizes, decode_inputs, encode, truncation, truncation_headers, whole
from sbert_infer.serve.routes.rerank import Reranking
from sbert_infer.serve.settings import MAX_INPUTS, Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.responses import as_numbers, json_array, json_response
from sbert_infer.serve.wire.schemas import (
    EmbedAllRequest,
    EmbedRequest,
    Info,
    Rank,
    RerankRequest,
    RootRequest,
    SimilarityInputs,
    SimilarityOptions,
    SimilarityRequest,
    Token,
    TokenEmbedRequest,
    TokenizeRequest,
)
from sbert_infer.similarity import similarity
from sbert_infer.types import Encoded

__all__ = ["Tei"]

_TAG = "text-embeddings-inference"
# To tokenize in one request: each token takes some 60 bytes of the answer, and 500 of memory until
# it is sent.
_MAX_CHARACTERS = 2**17


class Tei:
    """The handlers, and what there is to know of them."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings
        self._reranking = Reranking(models, settings)

    def operations(self) -> list[Operation]:
        """What is served."""
        ids = (TokenEmbedRequest,) if self._settings.allow_token_ids else ()
        problems = ("too_many_inputs", "context_length_exceeded", "token_ids_refused", "text_failed", "model_not_found")
        runs = (*RUNS, *problems, "not_supported")
        ranks = self._models.has_rerankers
        texts = {"inputs": ["A cat sat.", "A feline was sitting."]}
        pair = {"inputs": {"source_sentence": "A cat sat.", "sentences": ["A feline was sitting.", "Rain falls."]}}
        vectors, numbers, tokens = list[list[float]], list[float], list[list[Token]]
        return [
            Operation(
                "POST", "/embed", _TAG, "Embed texts", self.embed, vectors, (EmbedRequest, *ids), runs, example=texts
            ),
            Operation(
                "POST",
                "/embed_all",
                _TAG,
                "Embed each token",
                self.embed_all,
                list[list[list[float]]],
                (EmbedAllRequest,),
                (*runs, "not_supported"),
                example=texts,
                note="For models exported with `--outputs sentence,tokens`; special tokens included.",
            ),
            Operation(
                "POST",
                "/similarity",
                _TAG,
                "Compare a sentence with others",
                self.similarity,
                numbers,
                (SimilarityRequest,),
                runs,
                example=pair,
                note="Cosine similarity.",
            ),
            Operation(
                "POST",
                "/tokenize",
                _TAG,
                "Tokenize texts",
                self.tokenize,
                tokens,
                (TokenizeRequest,),
                (*READS, "empty_input", "too_many_inputs", "model_not_found"),
                example=texts,
            ),
            Operation(
                "POST",
                "/",
                _TAG,
                "Embed or compare",
                self.root,
                list[list[float] | float | Rank] if ranks else list[list[float] | float],
                (EmbedRequest, SimilarityRequest, *ids, *((RerankRequest,) if ranks else ())),
                runs,
                example=texts,
                note="For huggingface_hub: as `/embed`, or as `/similarity` if `inputs` has a `source_sentence`.",
            ),
            Operation("GET", "/info", _TAG, "What is served", self.info, Info),
        ]

    async def embed(self, request: Request) -> Response:
        """Embed texts."""
        body = await read_body(request, self._settings)
        asked = decode_inputs(body, EmbedRequest, TokenEmbedRequest, self._settings.allow_token_ids)
        return await self._embed(request, asked)

    async def embed_all(self, request: Request) -> Response:
        """A vector for each token."""
        asked = decode(await read_body(request, self._settings), EmbedAllRequest)
        model = self._model(asked.model)
        options = self._options(asked, normalize=False)
        model.check(options)
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        check_sizes(texts)
        record_of(request).texts = len(texts)
        found = await while_connected(request, model.token_vectors(texts, options))
        record_of(request).tokens = found.tokens
        rows = [await json_array(vectors, lambda start, some: list(as_numbers(some))) for vectors in found.vectors]
        return json_response(rows, truncation_headers(found))

    async def similarity(self, request: Request) -> Response:
        """Compare a sentence with others."""
        asked = decode(await read_body(request, self._settings), SimilarityRequest)
        return await self._similarity(request, asked.inputs, asked.parameters, asked.model)

    async def root(self, request: Request) -> Response:
        """Embed, compare or sort, as the body has it."""
        body = await read_body(request, self._settings)
        root = decode(body, RootRequest)
        if bytes(root.query):
            return await self._reranking.rerank_body(request, body)
        if bytes(root.inputs).startswith(b"{"):
            pair = decode(body, SimilarityRequest)
            return await self._similarity(request, pair.inputs, pair.parameters, pair.model)
        asked = decode_inputs(body, EmbedRequest, TokenEmbedRequest, self._settings.allow_token_ids)
        return await self._embed(request, asked)

    async def tokenize(self, request: Request) -> Response:
        """The tokens of texts, uncut."""
        asked = decode(await read_body(request, self._settings), TokenizeRequest)
        model = self._model(asked.model)
        model.check(EncodeOptions(normalize=False, truncate=False, prompt_name=asked.prompt_name))
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        if sum(map(len, texts)) > _MAX_CHARACTERS:
            raise Problem("body_too_large", f"at most {_MAX_CHARACTERS} characters are tokenized in one request")
        prompt = model.prompt(asked.prompt_name)
        work = asyncio.to_thread(_tokenize, model, [prompt + text for text in texts], asked.add_special_tokens)
        return Response(await while_connected(request, work), media_type="application/json")

    async def info(self, request: Request) -> Response:
        """What is served."""
        card = card_of(self._models.first)
        info = Info(
            model_id=card.name,
            model_sha=card.weights_sha256,
            model_dtype={"fp32": "float32", "fp16": "float16"}.get(card.precision, card.precision),
            model_type=_model_type(self._models.first),
            max_concurrent_requests=self._settings.max_connections,
            max_input_length=card.max_length,
            max_batch_tokens=card.max_batch_tokens,
            max_client_batch_size=MAX_INPUTS,
            auto_truncate=self._settings.auto_truncate,
            version=__version__,
            models=[card_of(model) for model in self._models],
        )
        return json_response(info)

    async def _embed(self, request: Request, asked: EmbedRequest) -> Response:
        model = self._model(asked.model)
        options = self._options(asked, dimensions=whole(asked.dimensions), normalize=asked.normalize is not False)
        encoded = await encode(request, model, asked.inputs, options)
        rows = await json_array(encoded.vectors, lambda start, vectors: list(as_numbers(vectors)))
        return json_response(rows, truncation_headers(encoded))

    async def _similarity(
        self, request: Request, inputs: SimilarityInputs, parameters: SimilarityOptions | None, name: str | None
    ) -> Response:
        model = self._model(name)
        options = self._options(parameters or SimilarityOptions(), normalize=True)
        encoded = await encode(request, model, [inputs.source_sentence, *inputs.sentences], options)
        return json_response(_cosines(encoded), truncation_headers(encoded))

    def _model(self, name: str | None) -> Model:
        return self._models.first_of(ENCODER) if name is None else self._models.get(name)

    def _options(
        self,
        asked: EmbedRequest | EmbedAllRequest | SimilarityOptions,
        *,
        normalize: bool,
        dimensions: int | None = None,
    ) -> EncodeOptions:
        truncate, side = truncation(asked, self._settings)
        return EncodeOptions(normalize, truncate, dimensions, asked.prompt_name, side)


def _model_type(model: Model) -> dict[str, dict[str, Any]]:
    """As text-embeddings-inference tells the kinds of models."""
    if model.kind == RERANKER:
        names = {str(index): label for index, label in enumerate(model.labels)}
        ids = {label: index for index, label in enumerate(model.labels)}
        return {"reranker" if len(names) == 1 else "classifier": {"id2label": names, "label2id": ids}}
    return {"embedding": {"pooling": "+".join(card_of(model).pooling)}}


def _cosines(encoded: Encoded) -> list[float]:
    cosines = similarity("cosine", encoded.vectors[:1], encoded.vectors[1:])
    if not np.isfinite(cosines).all():
        raise ArithmeticError("a similarity is not finite")
    return as_numbers(cosines)[0]


def _tokenize(model: Model, texts: list[str], add_special_tokens: bool) -> bytes:
    encodings = model.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    return bytes(json_response([_tokens(encoding, text) for encoding, text in zip(encodings, texts, strict=True)]).body)


def _tokens(encoding: Any, text: str) -> list[Token]:
    fields = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    return [
        Token(id, token, True, None, None) if special else Token(id, text[start:stop], False, start, stop)
        for id, token, special, (start, stop) in fields
    ]
