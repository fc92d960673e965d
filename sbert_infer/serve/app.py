"""The application: all operations behind the middleware."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from ..artifact import RERANKER, SPARSE_ENCODER
from ..errors import SbertInferError
from .answers import json_response
from .body import refuse
from .gate import Gate
from .keys import Keys
from .metrics import Metrics
from .models import Models
from .openai import OpenAI
from .openapi import describe
from .operation import RUNS, Operation, make_routes
from .probes import Probes
from .problems import Problem, problem_of
from .reranking import Reranking
from .room import Room
from .settings import Settings
from .sparse import Sparse
from .tei import Tei
from .watch import Watch, log_lost

__all__ = ["make_app"]


def make_app(models: Models, settings: Settings, metrics: Metrics) -> Starlette:
    """All routes. Every answer is noted outermost; a browser's preflight carries no key, so CORS comes before keys."""
    operations = [
        *OpenAI(models, settings).operations(),
        *Tei(models, settings).operations(),
        *Probes(models, settings, metrics).operations(),
    ]
    special = {
        RERANKER: Reranking(models, settings).operations(),
        SPARSE_ENCODER: Sparse(models, settings).operations(),
    }
    everything = [*operations, *(operation for some in special.values() for operation in some)]
    operations = [*everything, _description(operations, special, models, settings)]
    paths = {operation.path for operation in operations}
    running = {operation.path for operation in operations if set(RUNS) <= set(operation.problems)}
    app = Starlette(
        routes=make_routes(operations),
        middleware=[
            Middleware(Watch, routes=paths, models=models, metrics=metrics),
            *_cors(settings),
            Middleware(Keys, keys=settings.keys, max_body_bytes=settings.max_body_bytes),
            Middleware(Gate, paths=running, models=models, max_body_bytes=settings.max_body_bytes),
            Middleware(Room, max_body_bytes=settings.max_body_bytes),
        ],
        exception_handlers={kind: _refusal(settings) for kind in (Problem, SbertInferError, HTTPException)},
    )
    app.router.redirect_slashes = False  # it would be to whatever host the request names
    return app


def _description(
    operations: list[Operation], special: dict[str, list[Operation]], models: Models, settings: Settings
) -> Operation:
    """What describes the others. Made anew each time: a reload may bring other prompts or dimensions."""

    async def handler(request: Request) -> Response:
        # Without a model of their kind the special ones refuse.
        used = [operation for kind, some in special.items() if models.has(kind) for operation in some]
        served = [*operations, *used]
        return json_response(describe([*served, own], models.values, with_keys=bool(settings.keys)))

    own = Operation("GET", "/openapi.json", "Pages", "This description", handler, dict)
    return own


def _cors(settings: Settings) -> list[Middleware]:
    if not settings.cors_origins:
        return []
    exposed = ["x-request-id", "x-truncated-texts", "retry-after", "retry-after-ms"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=exposed,
        )
    ]


def _refusal(settings: Settings) -> ExceptionHandler:
    """What answers an error of a request or of an engine."""

    async def handler(request: Request, error: Exception) -> Response:
        if isinstance(error, SbertInferError):
            log_lost(error, request)
            error = problem_of(error)
        elif isinstance(error, HTTPException):
            error = _routing_problem(error, request)
        assert isinstance(error, Problem)  # noqa: S101  the handler is for nothing else
        return await refuse(error, request, settings.max_body_bytes)

    return handler


def _routing_problem(error: HTTPException, request: Request) -> Problem:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return Problem("method_not_allowed", f"use {allowed} here, not {request.method}", headers=error.headers)
    return Problem("not_found", "no such path: GET /docs lists all")
