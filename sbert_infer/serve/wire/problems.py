"""What can go wrong with a request, and how each dialect reports it.

A problem is identified by its code. OpenAI's routes respond with `{"error": {message, type, param,
code}, detail}`, Cohere's with `{message}`, all others with `{error, error_type}`, as
text-embeddings-inference does. The statuses differ, too: they are what the clients of each expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from starlette.responses import Response

from sbert_infer.errors import (
    DeadlineError,
    OverloadedError,
    RetryableError,
    SbertInferError,
    TextError,
    TruncationError,
)
from sbert_infer.serve.wire.cohere import CohereError
from sbert_infer.serve.wire.openai import OpenAIError, OpenAIErrorBody
from sbert_infer.serve.wire.schemas import TeiError

ErrorBody = OpenAIErrorBody | CohereError | TeiError


class Kind(NamedTuple):
    """The status of a problem in each dialect (Cohere's is OpenAI's), and TEI's name for it."""

    openai: int
    tei: int
    error_type: str


KINDS: Mapping[str, Kind] = {
    "invalid_json": Kind(400, 400, "Validation"),
    "invalid_request": Kind(400, 422, "Validation"),
    "invalid_header": Kind(400, 400, "Validation"),
    "empty_input": Kind(400, 400, "Empty"),
    "too_many_inputs": Kind(400, 413, "Validation"),
    "too_many_tokens": Kind(413, 413, "Validation"),
    "context_length_exceeded": Kind(400, 413, "Validation"),
    "token_ids_refused": Kind(400, 422, "Tokenizer"),
    "not_supported": Kind(404, 404, "Backend"),
    "text_failed": Kind(400, 424, "Backend"),
    "invalid_api_key": Kind(401, 401, "Unauthorized"),
    "forbidden": Kind(403, 403, "Forbidden"),
    "model_not_found": Kind(404, 404, "Validation"),
    "not_found": Kind(404, 404, "Validation"),
    "host_not_allowed": Kind(421, 421, "Validation"),
    "method_not_allowed": Kind(405, 405, "Validation"),
    "request_timeout": Kind(408, 408, "Validation"),
    "reload_failed": Kind(409, 409, "Backend"),
    "body_too_large": Kind(413, 413, "Validation"),
    "unsupported_media_type": Kind(415, 415, "Validation"),
    "overloaded": Kind(429, 429, "Overloaded"),
    "internal_error": Kind(500, 500, "Backend"),
    # Not 504: this is no gateway, and Retry-After has no meaning with it.
    "timeout": Kind(503, 503, "Overloaded"),
    "model_unavailable": Kind(503, 503, "Unhealthy"),
}


_OPENAI_PATHS = frozenset({"/embeddings", "/score"})


class Problem(Exception):  # noqa: N818  as HTTP calls it
    """Why a request can't be served, in words for its sender."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
            self.headers["retry-after-ms"] = str(max(1, math.ceil(retry_after_s * 1000)))


def error_body(path: str) -> type[ErrorBody]:
    """The type of the errors that a path responds with, which is to say its dialect."""
    if path == "/v1/embed" or path.startswith("/v2/"):
        return CohereError
    return OpenAIErrorBody if path in _OPENAI_PATHS or path.startswith(("/v1/", "/openai/")) else TeiError


def status_of(code: str, path: str) -> int:
    """The status of a problem at a path."""
    return KINDS[code].tei if error_body(path) is TeiError else KINDS[code].openai


def respond(problem: Problem, path: str) -> Response:
    """The response that reports a problem to a client of `path`."""
    status, dialect = status_of(problem.code, path), error_body(path)
    body: ErrorBody = TeiError(problem.message, KINDS[problem.code].error_type)
    if dialect is CohereError:
        body = CohereError(problem.message)
    elif dialect is OpenAIErrorBody:
        error = OpenAIError(problem.message, _openai_type(status), problem.param, problem.code)
        body = OpenAIErrorBody(error, problem.message)
    return Response(msgspec.json.encode(body), status, problem.headers, "application/json")


def problem_of(error: SbertInferError) -> Problem:
    """What a client may know about an engine's error.

    Reasons that come from a native library stay in the log.
    """
    if isinstance(error, TruncationError):
        limit = f"it has more than {error.limit} tokens"
        what = f"input {error.index} is longer than the model's limit: {limit}; shorten it"
        advice = 'or have it cut, with "truncate": true or the server\'s --auto-truncate'
        return Problem("context_length_exceeded", f"{what}, {advice}", param="input")
    if isinstance(error, TextError):
        reason = "gives NaN or infinity for" if error.not_finite else "fails on"
        return Problem("text_failed", f"the model {reason} input {error.index}: leave it out", param="input")
    if isinstance(error, OverloadedError):
        return Problem("overloaded", str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, DeadlineError):
        message = "it was not done in time: send fewer texts at once, or try again later"
        return Problem("timeout", message, retry_after_s=1.0)
    retry_after_s = error.retry_after_s if isinstance(error, RetryableError) else 1.0
    return Problem("model_unavailable", "the model can't run for now: try again later", retry_after_s=retry_after_s)


def _openai_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
