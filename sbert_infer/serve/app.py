"""The application: all operations behind the middleware."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from sbert_infer.artifact.manifest import RERANKER, SPARSE_ENCODER
from sbert_infer.serve.http.admission import Admission
from sbert_infer.serve.http.auth import KeyCheck, Keys
from sbert_infer.serve.http.body_memory import BodyMemory
from sbert_infer.serve.http.operation import Operation
from sbert_infer.serve.http.request_log import RequestLog
from sbert_infer.serve.http.router import Router
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.routes.admin import Admin
from sbert_infer.serve.routes.openai import OpenAI
from sbert_infer.serve.routes.openapi import describe
from sbert_infer.serve.routes.rerank import Reranking
from sbert_infer.serve.routes.sparse import Sparse
from sbert_infer.serve.routes.tei import Tei
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.responses import json_response

__all__ = ["make_app"]


def make_app(models: Models, settings: Settings, metrics: Metrics) -> ASGIApp:
    """Make the application.

    The middleware is listed from the inside out. CORS comes before the keys, since a browser's
    preflight carries none.
    """
    operations = [
        *OpenAI(models, settings).operations(),
        *Tei(models, settings).operations(),
        *Admin(models, settings, metrics).operations(),
    ]
    special = {
        RERANKER: Reranking(models, settings).operations(),
        SPARSE_ENCODER: Sparse(models, settings).operations(),
    }
    everything = [*operations, *(operation for some in special.values() for operation in some)]
    operations = [*everything, _description(operations, special, models, settings)]
    paths = {operation.path for operation in operations}
    running = {operation.path for operation in operations if operation.runs_model}
    app: ASGIApp = Router(operations, settings.max_body_bytes)
    app = BodyMemory(app, settings.max_body_bytes)
    app = Admission(app, running, models, settings.max_body_bytes)
    app = KeyCheck(app, Keys(settings.keys), settings.max_body_bytes)
    app = _cors(app, settings)
    return RequestLog(app, paths, models, metrics)


def _description(
    operations: list[Operation], special: dict[str, list[Operation]], models: Models, settings: Settings
) -> Operation:
    """The description, made for each request: a reload may bring other prompts or dimensions."""

    async def handler(request: Request) -> Response:
        # Without a model of their kind, the special operations only refuse.
        used = [operation for kind, some in special.items() if models.has(kind) for operation in some]
        served = [*operations, *used]
        return json_response(describe([*served, own], models.values, with_keys=bool(settings.keys)))

    own = Operation("GET", "/openapi.json", "Pages", "This description", handler, dict)
    return own


def _cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(settings.cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-truncated-texts", "retry-after", "retry-after-ms"],
    )
