"""The application: all operations behind the middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from sbert_infer.serve.http.auth import Access
from sbert_infer.serve.http.body_memory import BodyMemory
from sbert_infer.serve.http.operation import Operation
from sbert_infer.serve.http.reloading import Reloading
from sbert_infer.serve.http.request_log import POLLED, RequestLog
from sbert_infer.serve.http.router import Router
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.routes.admin import Admin
from sbert_infer.serve.routes.cohere import Cohere
from sbert_infer.serve.routes.ollama import Ollama
from sbert_infer.serve.routes.openai import OpenAI
from sbert_infer.serve.routes.openapi import describe
from sbert_infer.serve.routes.ranking import Ranking
from sbert_infer.serve.routes.rerank import Reranking
from sbert_infer.serve.routes.tei import Tei
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.responses import json_response

if TYPE_CHECKING:  # needs packages that may be missing
    from sbert_infer.serve.tracing import Tracing


def make_app(
    models: Models,
    settings: Settings,
    metrics: Metrics,
    access: Access,
    reloading: Reloading,
    tracing: Tracing | None = None,
) -> RequestLog:
    """Make the application.

    The middleware is listed from the inside out. CORS comes before the keys, since a browser's
    preflight carries none.
    """
    operations = [
        *OpenAI(models, settings).operations(),
        *Tei(models, settings).operations(),
        *Admin(models, metrics, access, reloading).operations(),
        *Reranking(models, settings).operations(),
        *Ranking(models, settings).operations(),
        *Cohere(models, settings).operations(),
        *Ollama(models, settings).operations(),
    ]
    operations.append(_description(operations, models, access))
    paths = {operation.path for operation in operations}
    app: ASGIApp = BodyMemory(Router(operations, models, settings, access), settings.max_body_bytes)
    app = _cors(app, settings)
    return RequestLog(app, paths, models, metrics, tracing)


def make_metrics_app(
    models: Models, settings: Settings, metrics: Metrics, access: Access, reloading: Reloading
) -> RequestLog:
    """Make the application of the port for metrics: those and the probes, for anyone."""
    operations = [each for each in Admin(models, metrics, access, reloading).operations() if each.path in POLLED]
    anyone = Access(Settings(models=()))
    return RequestLog(Router(operations, models, settings, anyone), POLLED, models, metrics)


def _description(operations: list[Operation], models: Models, access: Access) -> Operation:
    """The description, made again if a reload brings other prompts: that takes 10 ms."""
    made: dict[str, Any] = {}  # the last one, and what it was made for

    async def handler(request: Request) -> Response:
        served = [operation for operation in operations if operation.needs is None or models.has(operation.needs)]
        needed = served, models.values, bool(access.keys)
        if made.get("for") != needed:
            made.update({"for": needed, "content": describe(*needed[:2], with_keys=needed[2])})
        return json_response(made["content"])

    return Operation("GET", "/openapi.json", "Pages", "This description", handler, dict)


# Of responses, those that a page of another site may read.
_EXPOSED_HEADERS = (
    "x-request-id",
    "x-truncated-texts",
    "x-model-fingerprint",
    "retry-after",
    "retry-after-ms",
    "traceresponse",
)


def _cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(settings.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=list(_EXPOSED_HEADERS),
    )
