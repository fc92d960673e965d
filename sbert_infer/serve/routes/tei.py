"""The routes of text-embeddings-inference, except those that are for rerankers only."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sbert_infer import __version__
from sbert_infer.artifact.manifest import ENCODER, RERANKER, SPARSE_ENCODER, TOKENS
from sbert_infer.serve.http.body import decode
from sbert_infer.serve.http.caller import caller_of
from sbert_infer.serve.http.operation import READS, TEI, Operation, model_operation
from sbert_infer.serve.http.side_work import SideWork
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.routes.handle import (
    DenseOptions,
    decode_ids,
    decode_inputs,
    encode,
    id_lists,
    run_model,
    tei_truncation,
    texts_for,
    truncation_headers,
    whole,
)
from sbert_infer.serve.routes.rerank import Reranking
from sbert_infer.serve.settings import MAX_INPUTS, Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.responses import as_numbers, json_array, json_response, sparse_json_array
from sbert_infer.serve.wire.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    Info,
    ModelCard,
    Prediction,
    PredictRequest,
    Rank,
    RerankRequest,
    Shape,
    SimilarityOptions,
    SimilarityRequest,
    SparseValue,
    Token,
    TokenEmbedRequest,
    TokenizeRequest,
)
from sbert_infer.similarity import similarity
from sbert_infer.types import Encoded

# To tokenize in one request: each token takes some 60 bytes of the response, and 500 of memory
# until it is sent.
_MAX_CHARACTERS = 2**17
_MAX_TOKEN_NUMBERS = 2**22  # in one response with token vectors: some 50 MB of JSON

_REFUSED = ("token_ids_refused",)
_TEXTS = {"inputs": ["A cat sat.", "A feline was sitting."]}
_PREDICT = {"inputs": ["Who sat on the mat?", "A cat sat on the mat."]}
_PAIR = {"inputs": {"source_sentence": "A cat sat.", "sentences": ["A feline was sitting.", "Rain falls."]}}


class Tei:
    """The handlers of these routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings
        self._reranking = Reranking(models, settings)
        self._side_work = SideWork(settings.timeout_s)
        self._takes = (EmbedRequest, TokenEmbedRequest) if settings.allow_token_ids else (EmbedRequest,)

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        return [
            model_operation(
                "/embed", "Embed texts", self.embed, list[list[float]], self._takes, _REFUSED, example=_TEXTS
            ),
            model_operation(
                "/embed_all",
                "Embed each token",
                self.embed_all,
                list[list[list[float]]],
                (EmbedAllRequest,),
                example=_TEXTS,
                note="For models exported with `--outputs sentence,tokens`; special tokens included.",
            ),
            model_operation(
                "/similarity",
                "Compare a sentence with others",
                self.similarity,
                list[float],
                (SimilarityRequest,),
                example=_PAIR,
                note="Cosine similarity.",
            ),
            model_operation(
                "/embed_sparse",
                "Embed texts as sparse vectors",
                self.embed_sparse,
                list[list[SparseValue]],
                (EmbedSparseRequest,),
                example=_TEXTS,
                note="For sparse encoders (SPLADE): for each text the dimensions that are not zero, ascending.",
                needs=SPARSE_ENCODER,
            ),
            *self._other_operations(),
        ]

    def _other_operations(self) -> list[Operation]:
        """Those that run no model, or whose kind the body decides."""
        takes, gives = self._root_types()
        return [
            Operation(
                "POST",
                "/tokenize",
                TEI,
                "Tokenize texts",
                self.tokenize,
                list[list[Token]],
                (TokenizeRequest,),
                (*READS, "empty_input", "too_many_inputs", "model_not_found", "timeout"),
                example=_TEXTS,
            ),
            Operation(
                "POST",
                "/decode",
                TEI,
                "Texts of token ids",
                self.decode,
                list[str],
                (DecodeRequest,),
                (*READS, "empty_input", "too_many_inputs", "model_not_found", "timeout"),
                example={"ids": [[1, 2, 3]]},
            ),
            *(
                model_operation(
                    path,
                    summary,
                    self.root,
                    gives,
                    takes,
                    _REFUSED,
                    example=_TEXTS if self._models.first.manifest.kind != RERANKER else _PREDICT,
                    note="As `/embed`, `/embed_sparse` or `/predict`, whichever the first model is for; as "
                    "`/similarity` if `inputs` has a `source_sentence`, as `/rerank` if there is a `query`.",
                )
                for path, summary in (("/", "For huggingface_hub"), ("/invocations", "For SageMaker"))
            ),
            Operation("GET", "/info", TEI, "What is served", self.info, Info),
        ]

    def _root_types(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The types that `root` takes and gives with these models."""
        takes: tuple[Any, ...] = self._takes
        gives: tuple[Any, ...] = (list[list[float]],)
        if (kind := self._models.first.manifest.kind) == SPARSE_ENCODER:
            takes, gives = (EmbedSparseRequest,), (list[list[SparseValue]],)
        elif kind == RERANKER:
            takes, gives = (PredictRequest,), (list[Prediction | list[Prediction]],)
        if self._models.has(ENCODER):
            takes, gives = (*takes, SimilarityRequest), (*gives, list[float])
        if self._models.has(RERANKER):
            takes, gives = (*takes, RerankRequest), (*gives, list[Rank])
        return takes, gives

    async def embed(self, request: Request, body: bytes) -> Response:
        """Embed texts."""
        asked = decode_inputs(body, EmbedRequest, TokenEmbedRequest, self._settings.allow_token_ids)
        options = DenseOptions(
            normalize_embeddings=asked.normalize is not False,
            truncate_dim=whole(asked.dimensions),
            **tei_truncation(asked, self._settings),
        )
        model = self._models.find(asked.model, ENCODER)
        encoded = await encode(request, model, asked.inputs, asked.prompt_name, options)
        rows = await json_array(encoded.vectors, lambda start, vectors: list(as_numbers(vectors)))
        return json_response(rows, truncation_headers(encoded))

    async def embed_all(self, request: Request, body: bytes) -> Response:
        """Embed each token of each text."""
        asked = decode(body, EmbedAllRequest)
        model, texts = texts_for(asked, self._models, ENCODER)
        if TOKENS not in model.manifest.outputs or model.engine.engine.device != "cpu":
            message = f"model {model.name} was exported without token outputs, or is not on the CPU: use /embed"
            raise Problem("not_supported", message)
        work = model.engine.token_vectors(
            texts,
            asked.prompt_name,
            max_tokens=_MAX_TOKEN_NUMBERS // model.manifest.dim,
            **tei_truncation(asked, self._settings),
        )
        found = await run_model(request, model, len(texts), work)
        rows = [await json_array(vectors, lambda start, some: list(as_numbers(some))) for vectors in found.vectors]
        return json_response(rows, truncation_headers(found))

    async def embed_sparse(self, request: Request, body: bytes) -> Response:
        """Embed texts as sparse vectors."""
        asked = decode(body, EmbedSparseRequest)
        model, texts = texts_for(asked, self._models, SPARSE_ENCODER)
        cut = tei_truncation(asked, self._settings)
        work = model.engine.encode_sparse(texts, asked.prompt_name, **cut, **caller_of(request))
        encoded = await run_model(request, model, len(texts), work)
        return json_response(await sparse_json_array(encoded.vectors), truncation_headers(encoded))

    async def similarity(self, request: Request, body: bytes) -> Response:
        """Compare a sentence with others."""
        asked = decode(body, SimilarityRequest)
        parameters = asked.parameters or SimilarityOptions()
        options = DenseOptions(
            normalize_embeddings=True, truncate_dim=None, **tei_truncation(parameters, self._settings)
        )
        texts = [asked.inputs.source_sentence, *asked.inputs.sentences]
        model = self._models.find(asked.model, ENCODER)
        encoded = await encode(request, model, texts, parameters.prompt_name, options)
        return json_response(_cosines(encoded), truncation_headers(encoded))

    async def root(self, request: Request, body: bytes) -> Response:
        """Embed, compare, sort or score, as the body's fields and the first model's kind tell."""
        root = decode(body, Shape)
        if bytes(root.query):
            return await self._reranking.rerank(request, body)
        if bytes(root.inputs).startswith(b"{"):
            return await self.similarity(request, body)
        by_kind = {SPARSE_ENCODER: self.embed_sparse, RERANKER: self._reranking.predict}
        return await by_kind.get(self._models.first.manifest.kind, self.embed)(request, body)

    async def tokenize(self, request: Request, body: bytes) -> Response:
        """Tokenize texts, without truncation."""
        asked = decode(body, TokenizeRequest)
        model = self._models.find(asked.model, ENCODER)
        model.check(asked.prompt_name)
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        if sum(map(len, texts)) > _MAX_CHARACTERS:
            raise Problem("body_too_large", f"at most {_MAX_CHARACTERS} characters are tokenized in one request")
        prompt = "" if asked.prompt_name is None else model.engine.engine.prompts[asked.prompt_name]
        work = partial(_tokenize, model, [prompt + text for text in texts], asked.add_special_tokens)
        return Response(await self._side_work.run(request, work), media_type="application/json")

    async def decode(self, request: Request, body: bytes) -> Response:
        """Turn token ids into texts."""
        asked = decode_ids(body, DecodeRequest)
        model, ids = self._models.find(asked.model, ENCODER), id_lists(asked.ids)
        if sum(map(len, ids)) > _MAX_CHARACTERS:
            raise Problem("body_too_large", f"at most {_MAX_CHARACTERS} ids are decoded in one request")
        work = partial(_decode, model, ids, asked.skip_special_tokens)
        return json_response(await self._side_work.run(request, work))

    async def info(self, request: Request) -> Response:
        """Describe the server and its models."""
        card = _card(self._models.first)
        info = Info(
            model_id=card.name,
            model_sha=card.weights_sha256,
            model_dtype={"fp32": "float32", "fp16": "float16"}.get(card.precision, card.precision),
            model_type=_model_type(self._models.first),
            max_concurrent_requests=self._settings.max_connections,
            max_input_length=card.max_length,
            max_batch_tokens=card.max_batch_tokens,
            max_client_batch_size=MAX_INPUTS,
            auto_truncate=self._settings.auto_truncate is not False,
            version=__version__,
            models=[_card(model) for model in self._models],
        )
        return json_response(info)


def _card(model: Model) -> ModelCard:
    """What there is to know about a model as it runs now."""
    manifest, info = model.manifest, model.engine.engine.info
    return ModelCard(
        name=model.name,
        kind=manifest.kind,
        names=model.names,
        file=model.path.name,
        ready=model.ready,
        precision=manifest.precision,
        backend=info["backend"],
        device=info["device"],
        architecture=manifest.architecture,
        pooling=list(manifest.pooling),
        dim=min(manifest.truncate_dim or manifest.dim, manifest.dim),
        max_length=info["max_length"],
        normalized=manifest.normalized,
        similarity=manifest.similarity,
        prompts=sorted(manifest.prompts),
        default_prompt_name=manifest.default_prompt_name,
        max_batch_tokens=model.max_batch_tokens,
        workers=info["workers"],
        weights_sha256=manifest.weights_sha256,
        fingerprint=model.fingerprint.exact,
        model_fingerprint=model.fingerprint.model,
        fingerprint_parts=dict(model.fingerprint.parts),
        parity=dict(manifest.parity),
        versions=dict(manifest.versions),
    )


def _model_type(model: Model) -> dict[str, dict[str, Any]]:
    """The kind of a model, as text-embeddings-inference describes it."""
    if model.manifest.kind == RERANKER:
        names = {str(index): label for index, label in enumerate(model.manifest.labels)}
        ids = {label: index for index, label in enumerate(model.manifest.labels)}
        return {"reranker" if len(names) == 1 else "classifier": {"id2label": names, "label2id": ids}}
    return {"embedding": {"pooling": "+".join(model.manifest.pooling)}}


def _cosines(encoded: Encoded) -> list[float]:
    cosines = similarity("cosine", encoded.vectors[:1], encoded.vectors[1:])
    if not np.isfinite(cosines).all():
        raise ArithmeticError("a similarity is not finite")
    return as_numbers(cosines)[0]


def _decode(model: Model, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
    highest = model.tokenizer.get_vocab_size() - 1
    for index, some in enumerate(ids):
        if max(some) > highest:
            message = f"input {index} has a token id over {highest}, the last of model {model.name}"
            raise Problem("invalid_request", message, param="ids")
    texts: list[str] = model.tokenizer.decode_batch(ids, skip_special_tokens=skip_special_tokens)
    return texts


def _tokenize(model: Model, texts: list[str], add_special_tokens: bool) -> bytes:
    encodings = model.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    return bytes(json_response([_tokens(encoding, text) for encoding, text in zip(encodings, texts, strict=True)]).body)


def _tokens(encoding: Any, text: str) -> list[Token]:
    fields = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    return [
        Token(id, token, True, None, None) if special else Token(id, text[start:stop], False, start, stop)
        for id, token, special, (start, stop) in fields
    ]
