"""From a request to its handler, if it may pass, and from an error to its response."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router as PatternRouter
from starlette.types import Receive, Scope, Send

from sbert_infer.errors import SbertInferError
from sbert_infer.serve.http.auth import Access
from sbert_infer.serve.http.body import read_body, refuse
from sbert_infer.serve.http.caller import caller_of
from sbert_infer.serve.http.operation import Operation, make_routes
from sbert_infer.serve.http.request_log import log_engine_error
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem, problem_of


class Router:
    """Looks up most paths, and leaves patterns and unknown paths to Starlette's router.

    Starlette's tries one pattern after the other and wraps each request several times, a tenth of
    what a request costs.

    While the queue of the only model is full, requests for it are refused. That comes after the
    check of the keys, so that strangers learn nothing about the queue, and before the body is
    parsed, so that a refusal costs little. What passes may still be refused by the engine's own
    queue, which knows how many tokens a request has, and whether that makes it interactive or bulk:
    a request that does not say passes if either has room.
    """

    def __init__(self, operations: Sequence[Operation], models: Models, settings: Settings, access: Access) -> None:
        self._operations = {
            (operation.method, operation.path): operation for operation in operations if "{" not in operation.path
        }
        # A redirect would go to any host that the request names.
        self._others = PatternRouter(make_routes(operations), redirect_slashes=False)
        self._models, self._settings, self._access = models, settings, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        request = Request(scope, receive)
        operation = self._operations.get((scope["method"], scope["path"]))
        try:
            self._access.check(scope)
            if operation is None:
                scope["app"] = self  # makes Starlette raise if it finds nothing
                await self._others(scope, receive, send)
                return
            if operation.runs_model:
                self._models.check_room(**caller_of(request))
            if operation.takes:
                response = await operation.handler(request, await read_body(request, self._settings))
            else:
                response = await operation.handler(request)
        except (Problem, SbertInferError, HTTPException) as error:
            response = await self._refusal(request, error)
        await response(scope, receive, send)

    async def _refusal(self, request: Request, error: Exception) -> Response:
        if isinstance(error, SbertInferError):
            log_engine_error(error, request)
            error = problem_of(error)
        elif isinstance(error, HTTPException):
            error = _routing_problem(error, request)
        assert isinstance(error, Problem)  # noqa: S101  there is no other kind
        return await refuse(error, request, self._settings.max_body_bytes)


def _routing_problem(error: HTTPException, request: Request) -> Problem:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Problem("method_not_allowed", f"use {allowed} here, not {request.method}", headers=error.headers)
    return Problem("not_found", "no such path: GET /docs lists all")
