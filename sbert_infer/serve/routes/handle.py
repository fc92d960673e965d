"""From a request's body to vectors: what the dialects share."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Sequence
from typing import Any, TypedDict, TypeVar

from starlette.requests import Request

from sbert_infer.artifact.manifest import ENCODER
from sbert_infer.errors import CallTooLargeError
from sbert_infer.serve.http.body import decode, while_connected
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.settings import MAX_INPUTS, Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.schemas import TextsRequest, Truncating
from sbert_infer.types import Encoded, OnTruncate, Side

Inputs = str | Sequence[str] | Sequence[int | list[int]]
Texts = TypeVar("Texts")
Ids = TypeVar("Ids")

_REFUSED = (
    "token ids are not accepted: those of another tokenizer, such as tiktoken's, would silently give wrong vectors. "
    "Send texts (langchain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or, if the ids are of this model's "
    "own tokenizer, start the server with --allow-token-ids"
)
# In one text. A long one is cut before it is tokenized, but where that is not possible, as in a
# million spaces, the tokenizer takes 100 bytes and 2 microseconds for each.
_MAX_CHARACTERS = 2**20
_SEARCHED_BYTES = 2**16  # of a body that is no text, for token ids: a search of 16 MB takes half a second
# Matches if the first input is a number or a list that begins with one. Up to 16 empty lists before
# it are skipped, no more, since each takes memory. Inside a text, the quotes would be escaped.
_IDS = re.compile(rb'"inputs?"\s*:\s*\[(\s*\[\s*\]\s*,){0,16}\s*(\[\s*)?-?\d')


class Truncation(TypedDict):
    """Arguments of all calls of an engine: what to do with texts over the model's limit."""

    on_truncate: OnTruncate
    truncation_side: Side | None  # None: where the model was trained to cut


class DenseOptions(Truncation):
    """Arguments of the calls for dense vectors."""

    normalize_embeddings: bool
    truncate_dim: int | None


def decode_inputs(body: bytes, texts: type[Texts], ids: type[Ids], allow_token_ids: bool) -> Texts | Ids:
    """Decode a body that holds texts or token ids."""
    try:
        return decode(body, texts)
    except Problem as problem:
        if problem.code == "invalid_json" or not _IDS.search(body, 0, _SEARCHED_BYTES):
            raise
    if not allow_token_ids:
        raise Problem("token_ids_refused", _REFUSED, param="input")
    if body.count(b"[") > MAX_INPUTS + 1:  # before millions of lists are made
        raise Problem("too_many_inputs", f"at most {MAX_INPUTS} lists of token ids in a request", param="input")
    return decode(body, ids)


async def encode(
    request: Request, model: Model, inputs: Inputs, prompt_name: str | None, options: DenseOptions
) -> Encoded:
    """Encode a request's texts or token ids to vectors, [texts, dim]."""
    model.require(ENCODER)
    model.check(prompt_name, options["truncate_dim"])
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs[0], str):
        texts = [text for text in inputs if isinstance(text, str)]
        check_sizes(texts)
        return await run_model(request, len(texts), model.engine.encode_counted(texts, prompt_name, **options))
    ids = _id_lists(inputs, prompt_name)
    return await run_model(request, len(ids), model.engine.encode_tokens(ids, **options))


async def run_model(request: Request, texts: int, work: Coroutine[Any, Any, Encoded]) -> Encoded:
    """Await a call of an engine, cancelled if the client leaves, and note its size for the log.

    No other await may come between looking up the engine and this, or a reload could lose the call.
    """
    record = record_of(request)
    record.texts = texts
    try:
        result = await while_connected(request, work)
    except ValueError as error:
        code = "too_many_tokens" if isinstance(error, CallTooLargeError) else "invalid_request"
        raise Problem(code, str(error), param="input") from None
    record.tokens = result.tokens
    return result


def truncation_headers(encoded: Encoded) -> dict[str, str]:
    """The header that says how many texts were cut, if any."""
    return {"x-truncated-texts": str(encoded.truncated)} if encoded.truncated else {}


def whole(number: float | None) -> int | None:
    """Convert a whole number, which JSON may have as 64.0."""
    return None if number is None else int(number)


def truncation(asked: Truncating, settings: Settings) -> Truncation:
    """What a request in TEI's dialect says about truncation."""
    truncate = settings.auto_truncate if asked.truncate is None else asked.truncate
    side: Side | None = None
    if asked.truncation_direction is not None:
        side = "left" if asked.truncation_direction.lower() == "left" else "right"
    return {"on_truncate": "ignore" if truncate else "error", "truncation_side": side}


def texts_for(asked: TextsRequest, models: Models, kind: str) -> tuple[Model, list[str]]:
    """The model of this kind that a request is for, and its texts. Both are checked."""
    model = models.find(asked.model, kind)
    model.require(kind)
    model.check(asked.prompt_name)
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    check_sizes(texts)
    return model, texts


def check_sizes(texts: Sequence[str]) -> None:
    """Refuse a text that is too long to be tokenized at all."""
    for index, text in enumerate(texts):
        if len(text) > _MAX_CHARACTERS:
            message = f"input {index} has {len(text)} characters, at most {_MAX_CHARACTERS} are read: shorten it"
            raise Problem("context_length_exceeded", message, param="input")


def _id_lists(inputs: Sequence[object], prompt_name: str | None) -> list[list[int]]:
    if prompt_name is not None:
        raise Problem("invalid_request", "prompt_name is for texts, not for token ids", param="prompt_name")
    lists = [item for item in inputs if isinstance(item, list)]
    if not lists:
        return [[item for item in inputs if isinstance(item, int)]]
    if len(lists) != len(inputs):
        raise Problem("invalid_request", "token ids are one list, or a list of lists, not a mixture", param="input")
    return lists
