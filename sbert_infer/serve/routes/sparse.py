"""The route for sparse encoders, as text-embeddings-inference has it: /embed_sparse."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.artifact.manifest import SPARSE_ENCODER
from sbert_infer.encode.sparse import SparseRows
from sbert_infer.serve.http.body import decode, read_body, while_connected
from sbert_infer.serve.http.operation import RUNS, Operation
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import EncodeOptions, Model
from sbert_infer.serve.routes.handle import check_sizes, truncation, truncation_headers
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.responses import as_numbers, json_response
from sbert_infer.serve.wire.schemas import EmbedSparseRequest, SparseValue

__all__ = ["Sparse"]

_TAG = "text-embeddings-inference"
_PIECE_NUMBERS = 8192  # some 3 ms
_MAX_NUMBERS = 2**21  # in one answer: some 60 MB of JSON. Trained models give a few hundred for a text

_encoder = msgspec.json.Encoder()


class Sparse:
    """The handler, and what there is to know of it."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings

    def operations(self) -> list[Operation]:
        """What is served."""
        problems = ("too_many_inputs", "context_length_exceeded", "text_failed", "model_not_found", "not_supported")
        return [
            Operation(
                "POST",
                "/embed_sparse",
                _TAG,
                "Embed texts as sparse vectors",
                self.embed_sparse,
                list[list[SparseValue]],
                (EmbedSparseRequest,),
                (*RUNS, *problems),
                example={"inputs": ["A cat sat.", "A feline was sitting."]},
                note="For sparse encoders (SPLADE): of each text the dimensions that are not zero, ascending.",
            )
        ]

    async def embed_sparse(self, request: Request) -> Response:
        """Embed texts."""
        asked = decode(await read_body(request, self._settings), EmbedSparseRequest)
        model = self._model(asked.model)
        model.require(SPARSE_ENCODER)
        truncate, side = truncation(asked, self._settings)
        options = EncodeOptions(normalize=False, truncate=truncate, prompt_name=asked.prompt_name, side=side)
        model.check(options)
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        check_sizes(texts)
        record_of(request).texts = len(texts)
        encoded = await while_connected(request, model.encode_sparse(texts, options))
        record_of(request).tokens = encoded.tokens
        return json_response(await _json_rows(encoded.vectors), truncation_headers(encoded))

    def _model(self, name: str | None) -> Model:
        return self._models.first_of(SPARSE_ENCODER) if name is None else self._models.get(name)


async def _json_rows(rows: SparseRows) -> msgspec.Raw:
    """In pieces, with a turn for other requests after each."""
    if (numbers := sum(len(values) for _, values in rows)) > _MAX_NUMBERS:
        message = f"the vectors have {numbers} active dimensions, at most {_MAX_NUMBERS} are sent at once: send fewer"
        raise Problem("too_many_inputs", message, param="inputs")
    pieces, size = [], 0
    for dims, values in rows:
        size += len(dims)
        if size > _PIECE_NUMBERS:
            await asyncio.sleep(0)
            size = 0
        numbered = zip(dims.tolist(), as_numbers(values[None])[0], strict=True)
        pieces.append(_encoder.encode([SparseValue(index, value) for index, value in numbered]))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
