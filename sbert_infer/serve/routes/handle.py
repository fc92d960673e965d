"""From a request's body to vectors: what both dialects share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from starlette.requests import Request

from sbert_infer.serve.http.body import decode, while_connected
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.served_model import EncodeOptions, Model
from sbert_infer.serve.settings import MAX_INPUTS, Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.schemas import Direction
from sbert_infer.types import Encoded, Side

__all__ = ["Inputs", "check_sizes", "decode_inputs", "encode", "truncation", "truncation_headers", "whole"]

Inputs = str | Sequence[str] | Sequence[int | list[int]]
Texts = TypeVar("Texts")
Ids = TypeVar("Ids")

_REFUSED = (
    "token ids are not accepted: those of another tokenizer, such as tiktoken's, would give wrong vectors in silence. "
    "Send texts (langchain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or, if the ids are of this model's "
    "own tokenizer, start the server with --allow-token-ids"
)
# Of a text. A long one is cut before it is tokenized, but where that can't be done, in a million
# spaces say, the tokenizer takes 100 bytes and 2 microseconds for each.
_MAX_CHARACTERS = 2**20
# Where a number is the first input, or the first in it, or in one of the next if those are empty:
# of a few, for each takes memory. In a text, the quotes would be escaped.
_IDS = re.compile(rb'"inputs?"\s*:\s*\[(\s*\[\s*\]\s*,){0,16}\s*(\[\s*)?-?\d')


def decode_inputs(body: bytes, texts: type[Texts], ids: type[Ids], allow_token_ids: bool) -> Texts | Ids:
    """The request in a body, of texts or of token ids."""
    try:
        return decode(body, texts)
    except Problem as problem:
        if problem.code == "invalid_json" or not _IDS.search(body):
            raise
    if not allow_token_ids:
        raise Problem("token_ids_refused", _REFUSED, param="input")
    if body.count(b"[") > MAX_INPUTS + 1:  # before millions of lists are made
        raise Problem("too_many_inputs", f"at most {MAX_INPUTS} lists of token ids in a request", param="input")
    return decode(body, ids)


async def encode(request: Request, model: Model, inputs: Inputs, options: EncodeOptions) -> Encoded:
    """The vectors of a request, [texts, dim]. The work is dropped if the client leaves."""
    model.check(options)
    record = record_of(request)
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs[0], str):
        texts = [text for text in inputs if isinstance(text, str)]
        record.texts = len(texts)
        check_sizes(texts)
        encoded = await while_connected(request, model.encode(texts, options))
    else:
        ids = _id_lists(inputs, options)
        record.texts = len(ids)
        encoded = await while_connected(request, model.encode_tokens(ids, options))
    record.tokens = encoded.tokens
    return encoded


def truncation_headers(encoded: Encoded) -> dict[str, str]:
    """How many texts were cut, for those who look."""
    return {"x-truncated-texts": str(encoded.truncated)} if encoded.truncated else {}


def whole(number: float | None) -> int | None:
    """A whole number, which JSON may have as 64.0."""
    return None if number is None else int(number)


class _Truncating(Protocol):
    truncate: bool | None
    truncation_direction: Direction | None


def truncation(asked: _Truncating, settings: Settings) -> tuple[bool, Side | None]:
    """Whether a request of TEI's has long texts cut, and where, in the engine's words."""
    truncate = settings.auto_truncate if asked.truncate is None else asked.truncate
    if asked.truncation_direction is None:
        return truncate, None
    return truncate, "left" if asked.truncation_direction.lower() == "left" else "right"


def check_sizes(texts: Sequence[str]) -> None:
    """Refuse a text that is too long to be read at all."""
    for index, text in enumerate(texts):
        if len(text) > _MAX_CHARACTERS:
            message = f"input {index} has {len(text)} characters, at most {_MAX_CHARACTERS} are read: shorten it"
            raise Problem("context_length_exceeded", message, param="input")


def _id_lists(inputs: Sequence[object], options: EncodeOptions) -> list[list[int]]:
    if options.prompt_name is not None:
        raise Problem("invalid_request", "prompt_name is for texts, not for token ids", param="prompt_name")
    lists = [item for item in inputs if isinstance(item, list)]
    if not lists:
        return [[item for item in inputs if isinstance(item, int)]]
    if len(lists) != len(inputs):
        raise Problem("invalid_request", "token ids are one list, or a list of lists, not a mixture", param="input")
    return lists
