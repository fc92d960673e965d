"""Before anything is read: requests that the queue would refuse anyhow. The cheaper that is, the more others get."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .body import refuse
from .models import Models
from .problems import problem_of

__all__ = ["Gate"]


class Gate:
    """Middleware that answers 429 on `paths`, which run a model, while no model would take one more text."""

    def __init__(self, app: ASGIApp, paths: Collection[str], models: Models, max_body_bytes: int) -> None:
        self._app, self._paths, self._models, self._max_body_bytes = app, frozenset(paths), models, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        runs = scope["method"] == "POST" and scope["path"] in self._paths
        if runs and (refusal := self._models.refusal()) is not None:
            response = await refuse(problem_of(refusal), Request(scope, receive), self._max_body_bytes)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)
