"""Operations: a method of a path, and what the router and /openapi.json need to know about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[..., Awaitable[Response]]  # of a request, and of its body if the operation takes one

OPENAI, TEI, COHERE, OLLAMA = "OpenAI", "text-embeddings-inference", "Cohere", "Ollama"  # tags of their routes
# What can go wrong while a body is read, and while a model runs.
READS = ("invalid_json", "invalid_request", "request_timeout", "body_too_large", "unsupported_media_type", "overloaded")
_RUNS = (
    *READS,
    "invalid_header",
    "empty_input",
    "timeout",
    "model_unavailable",
    "too_many_inputs",
    "too_many_tokens",
    "context_length_exceeded",
    "text_failed",
    "model_not_found",
    "not_supported",
)


@dataclass(frozen=True)
class Operation:
    """What is done for `method` `path`, what it takes and what it gives."""

    method: str
    path: str
    tag: str
    summary: str
    handler: Handler
    response: Any  # the type of its JSON, or a tuple of several; None for other media types
    takes: tuple[Any, ...] = ()  # the types of its JSON body
    problems: tuple[str, ...] = ()
    media_type: str = "application/json"
    example: Any = None  # of a body
    note: str = ""
    runs_model: bool = False  # so that it is refused while the queue is full
    needs: str | None = None  # the kind of model without which it only refuses


def model_operation(
    path: str,
    summary: str,
    handler: Handler,
    response: Any,
    takes: tuple[Any, ...],
    problems: tuple[str, ...] = (),
    *,
    tag: str = TEI,
    **options: Any,
) -> Operation:
    """Make an operation that runs a model: POST, JSON in and out, and the problems they share."""
    problems = (*_RUNS, *problems)
    return Operation("POST", path, tag, summary, handler, response, takes, problems, runs_model=True, **options)


def make_routes(operations: Iterable[Operation]) -> list[Route]:
    """Make one route for each path, whatever its methods."""
    by_path: dict[str, dict[str, Handler]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, {})[operation.method] = operation.handler
    return [Route(path, _dispatch(handlers), methods=list(handlers)) for path, handlers in by_path.items()]


def _dispatch(handlers: dict[str, Handler]) -> Handler:
    async def endpoint(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return endpoint
