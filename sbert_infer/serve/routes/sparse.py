"""The route for sparse encoders, as text-embeddings-inference has it: /embed_sparse."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.artifact.manifest import SPARSE_ENCODER
from sbert_infer.encode.sparse import SparseRows
from sbert_infer.serve.http.body import decode
from sbert_infer.serve.http.operation import Operation, model_operation
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.routes.handle import as_list, check_sizes, run_model, truncation, truncation_headers
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.responses import as_numbers, json_response
from sbert_infer.serve.wire.schemas import EmbedSparseRequest, SparseValue

_PIECE_NUMBERS = 8192  # some 3 ms
_MAX_NUMBERS = 2**21  # in one response: some 60 MB of JSON. Trained models give a few hundred per text

_encoder = msgspec.json.Encoder()


class Sparse:
    """The handler of this route."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings

    def operations(self) -> list[Operation]:
        """The operation on this route."""
        return [
            model_operation(
                "/embed_sparse",
                "Embed texts as sparse vectors",
                self.embed_sparse,
                list[list[SparseValue]],
                (EmbedSparseRequest,),
                example={"inputs": ["A cat sat.", "A feline was sitting."]},
                note="For sparse encoders (SPLADE): for each text the dimensions that are not zero, ascending.",
                needs=SPARSE_ENCODER,
            )
        ]

    async def embed_sparse(self, request: Request, body: bytes) -> Response:
        """Embed texts as sparse vectors."""
        asked = decode(body, EmbedSparseRequest)
        model = self._models.find(asked.model, SPARSE_ENCODER)
        model.require(SPARSE_ENCODER)
        model.check(asked.prompt_name)
        texts = as_list(asked.inputs)
        check_sizes(texts)
        work = model.engine.encode_sparse(texts, asked.prompt_name, **truncation(asked, self._settings))
        encoded = await run_model(request, len(texts), work)
        return json_response(await _json_rows(encoded.vectors), truncation_headers(encoded))


async def _json_rows(rows: SparseRows) -> msgspec.Raw:
    """Encode the rows in pieces, and let other requests run after each."""
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
