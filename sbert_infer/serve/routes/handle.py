"""From a request's body to vectors: what the dialects share."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Sequence
from typing import Any, TypedDict, TypeVar

from starlette.requests import Request

from sbert_infer.artifact.manifest import ENCODER
from sbert_infer.errors import CallTooLargeError
from sbert_infer.serve.http.body import decode, while_connected
from sbert_infer.serve.http.body_memory import reserve
from sbert_infer.serve.http.caller import caller_of
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.settings import MAX_INPUTS, Settings
from sbert_infer.serve.wire.openai import Cutting
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.schemas import TextsRequest, Truncating, VectorType
from sbert_infer.types import Encoded, OnTruncate, Side

Inputs = str | Sequence[str] | Sequence[int | list[int]]
Texts = TypeVar("Texts")
Ids = TypeVar("Ids")
Value = TypeVar("Value")

_REFUSED = (
    "token ids are not accepted: those of another tokenizer, such as tiktoken's, would silently give wrong vectors. "
    "Send texts (langchain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or, if the ids are of this model's "
    "own tokenizer, start the server with --allow-token-ids"
)
# In one text. A long one is cut before it is tokenized, but where that is not possible, as in a
# million spaces, the tokenizer takes 100 bytes and 2 microseconds for each.
_MAX_CHARACTERS = 2**20
_SEARCHED_BYTES = 2**16  # of a body that is no text, for token ids: a search of 16 MB takes half a second
_NUMBER_BYTES = 4  # of a vector, which is held until the response is read: few tokens may have many vectors
_MAX_LISTS = MAX_INPUTS + 100  # in a body: one for each input, and for fields
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
    return decode_ids(body, ids)


def decode_ids(body: bytes, ids: type[Ids]) -> Ids:
    """Decode a body that holds token ids."""
    if body.count(b"[") > _MAX_LISTS:  # before millions of them are made
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
    reserve(request, len(inputs) * model.manifest.dim * _NUMBER_BYTES)
    if isinstance(inputs[0], str):
        texts = [text for text in inputs if isinstance(text, str)]
        check_sizes(texts)
        work = model.engine.encode_counted(texts, prompt_name, **options, **caller_of(request))
        return await run_model(request, model, len(texts), work)
    if prompt_name is not None:
        raise Problem("invalid_request", "prompt_name is for texts, not for token ids", param="prompt_name")
    ids = id_lists(inputs)
    return await run_model(request, model, len(ids), model.engine.encode_tokens(ids, **options, **caller_of(request)))


async def run_model(request: Request, model: Model, texts: int, work: Coroutine[Any, Any, Encoded]) -> Encoded:
    """Await a call of a model's engine, cancelled if the client leaves, and note it for the log.

    No other await may come between looking up the engine and this, or a reload could lose the call.
    """
    record = record_of(request)
    record.model, record.texts, fingerprint = model.name, texts, model.fingerprint.exact
    try:
        result = await while_connected(request, work)
    except ValueError as error:
        code = "too_many_tokens" if isinstance(error, CallTooLargeError) else "invalid_request"
        raise Problem(code, str(error), param="input") from None
    record.tokens, record.fingerprint = result.tokens, fingerprint
    return result


def truncation_headers(encoded: Encoded) -> dict[str, str]:
    """The header that says how many texts were cut, if any."""
    return {"x-truncated-texts": str(encoded.truncated)} if encoded.truncated else {}


def whole(number: float | None) -> int | None:
    """Convert a whole number, which JSON may have as 64.0."""
    return None if number is None else int(number)


def truncation(settings: Settings, asked: bool | str | None, side: str | None = None, *, cut: bool) -> Truncation:
    """What to do with texts over the model's limit.

    Args:
        settings: the server's, which count if the request says nothing.
        asked: what the request says: whether to cut, or NONE, START or END.
        side: where to cut, if the request says so.
        cut: what the contract does if neither says anything.

    """
    if isinstance(asked, str):
        side, asked = {"START": "left", "END": "right"}.get(asked, side), asked != "NONE"
    if asked is None:
        asked = cut if settings.auto_truncate is None else settings.auto_truncate
    where: Side | None = None
    if side is not None:
        where = "left" if side.lower() == "left" else "right"
    return {"on_truncate": "ignore" if asked else "error", "truncation_side": where}


def tei_truncation(asked: Truncating, settings: Settings) -> Truncation:
    """What a request in TEI's dialect says about truncation; TEI cuts by default."""
    return truncation(settings, asked.truncate, asked.truncation_direction, cut=True)


def any_truncation(
    asked: Cutting, model: Model, settings: Settings, *, cut: bool, **limits: float | None
) -> Truncation:
    """What a request says about truncation in the words of NIM, Jina, Voyage or vLLM."""
    at_limit = cut_at(model, truncate_prompt_tokens=asked.truncate_prompt_tokens, **limits)
    cuts = None if asked.truncate is None else asked.truncate not in (False, "NONE")
    one_of(truncate=cuts, truncation=asked.truncation)
    given: bool | str | None = asked.truncation if asked.truncate is None else asked.truncate
    return truncation(settings, at_limit if given is None else given, asked.truncation_side, cut=cut)


def cut_at(model: Model, **limits: float | None) -> bool | None:
    """Whether a request that names a limit in tokens asks to cut: True, or None if it names none.

    Texts are only cut at the model's own limit, so a lower one is refused.
    """
    named = {param: tokens for param, tokens in limits.items() if tokens is not None}
    for param, tokens in named.items():
        if -1 < tokens < model.manifest.max_length:
            ask = f"must be -1, or at least the {model.manifest.max_length} tokens that model {model.name} takes"
            raise Problem("invalid_request", f"{param} {ask}: texts are cut at the model's limit only", param=param)
    return True if named else None


def one_of(**given: Value | None) -> Value | None:
    """The value of the fields that mean the same, None if none is given. They must agree."""
    named = {name: value for name, value in given.items() if value is not None}
    values = list(named.values())
    if any(value != values[0] for value in values):
        raise Problem("invalid_request", f"{' and '.join(named)} contradict each other: send one", param=[*named][-1])
    return values[0] if values else None


def prompt_for(model: Model, prompt_name: str | None = None, /, **input_types: str | None) -> str | None:
    """The name of the prompt that a request asks for, by its name or by what the texts are."""
    chosen = {} if prompt_name is None else {"prompt_name": prompt_name}
    for param, input_type in input_types.items():
        if input_type is not None:
            chosen[param] = model.prompt_name_for(input_type, param) or ""
    return one_of(**chosen) or None


def has_unit_length(model: Model, dimensions: int | None) -> bool:
    """Whether vectors get length 1, as OpenAI's have it: not if their length has a meaning."""
    return model.manifest.similarity == "cosine" or dimensions is not None


def check_type(kind: VectorType, model: Model, *, unit: bool) -> None:
    """Refuse 8 bits for vectors without a known range."""
    if kind in ("int8", "uint8") and not unit:
        message = f"{kind} needs vectors of length 1, which those of model {model.name} are not: ask for float"
        raise Problem("invalid_request", message, param="encoding_format")


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


def id_lists(inputs: Sequence[object]) -> list[list[int]]:
    """The token ids of each text, given as one list or as a list of lists."""
    lists = [item for item in inputs if isinstance(item, list)]
    if not lists:
        return [[item for item in inputs if isinstance(item, int)]]
    if len(lists) != len(inputs):
        raise Problem("invalid_request", "token ids are one list, or a list of lists, not a mixture", param="input")
    return lists
