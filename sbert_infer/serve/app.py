"""The application: all operations behind the middleware."""

from __future__ import annotations

from typing import NamedTuple

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from sbert_infer.artifact.manifest import RERANKER, SPARSE_ENCODER
from sbert_infer.serve.http.admission import Gate
from sbert_infer.serve.http.auth import KeyCheck, Keys
from sbert_infer.serve.http.body_memory import Room
from sbert_infer.serve.http.operation import RUNS, Operation
from sbert_infer.serve.http.request_log import Watch
from sbert_infer.serve.http.router import Router
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.routes.admin import Probes
from sbert_infer.serve.routes.openai import OpenAI
from sbert_infer.serve.routes.openapi import describe
from sbert_infer.serve.routes.rerank import Reranking
from sbert_infer.serve.routes.sparse import Sparse
from sbert_infer.serve.routes.tei import Tei
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.responses import json_response

__all__ = ["App", "make_app"]


class App(NamedTuple):
    """What answers requests, and what connections ask before they pass one on."""

    asgi: ASGIApp
    gate: Gate


def make_app(models: Models, settings: Settings, metrics: Metrics) -> App:
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
    largest = settings.max_body_bytes
    keys = Keys(settings.keys)
    gate = Gate(Room(Router(operations, largest), largest), running, models, keys, metrics, largest)
    app = _cors(KeyCheck(gate, keys, largest), settings)
    return App(Watch(app, paths, models, metrics), gate)


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
