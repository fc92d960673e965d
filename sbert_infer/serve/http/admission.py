"""The one admission check: while every queue is full, requests for a model are refused unread."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sbert_infer.serve.http.body import refuse
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.wire.problems import problem_of

__all__ = ["Admission"]


class Admission:
    """Middleware that responds 429 on `paths` while no model would take one more text.

    It comes after the check of the keys, so that strangers learn nothing about the queue, and
    before the body is parsed, so that a refusal costs little. What it lets through may still be
    refused by the engine's own queue, which knows how many tokens a request has.
    """

    def __init__(self, app: ASGIApp, paths: Collection[str], models: Models, max_body_bytes: int) -> None:
        self._app, self._paths, self._models = app, frozenset(paths), models
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        runs_model = scope["method"] == "POST" and scope["path"] in self._paths
        error = self._models.refusal() if runs_model else None
        if error is None:
            await self._app(scope, receive, send)
            return
        self._models.count_refusal(error)
        response = await refuse(problem_of(error), Request(scope, receive), self._max_body_bytes)
        await response(scope, receive, send)
