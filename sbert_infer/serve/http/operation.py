"""An operation: one method of one path, with all that both the router and the description need to know of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["Handler", "Operation", "make_routes"]

Handler = Callable[[Request], Awaitable[Response]]

READS = ("invalid_json", "invalid_request", "request_timeout", "body_too_large", "unsupported_media_type", "overloaded")
RUNS = (*READS, "empty_input", "timeout", "model_unavailable")


@dataclass(frozen=True)
class Operation:
    """What is done for `method` `path`, what it takes and what it gives."""

    method: str
    path: str
    tag: str
    summary: str
    handler: Handler
    answer: Any  # the type of its JSON; None for other media types
    takes: tuple[Any, ...] = ()  # the types of its JSON body
    problems: tuple[str, ...] = ()
    media_type: str = "application/json"
    example: Any = None  # of a body
    note: str = ""


def make_routes(operations: Iterable[Operation]) -> list[Route]:
    """One route for each path, whatever its methods."""
    by_path: dict[str, dict[str, Handler]] = {}
    for operation in operations:
        by_path.setdefault(operation.path, {})[operation.method] = operation.handler
    return [Route(path, _dispatch(handlers), methods=list(handlers)) for path, handlers in by_path.items()]


def _dispatch(handlers: dict[str, Handler]) -> Handler:
    async def endpoint(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return endpoint
