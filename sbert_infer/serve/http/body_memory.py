"""The memory of all bodies together: each alone is bounded by `--max-body-bytes`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sbert_infer.serve.wire.problems import Problem

__all__ = ["BodyMemory", "reserve"]

_BODIES = 8  # of the largest size allowed
_LEAST_BYTES = 128 * 2**20
_ALWAYS_BYTES = 64 * 2**10  # for an ordinary request, however much large ones hold


class BodyMemory:
    """Middleware that releases what a request has reserved when the request ends."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self.free_bytes = max(_LEAST_BYTES, _BODIES * max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        scope["sbert.body_memory"], scope["sbert.reserved_bytes"] = self, 0
        try:
            await self._app(scope, receive, send)
        finally:
            self.free_bytes += scope["sbert.reserved_bytes"]


def reserve(request: Request, size: int) -> None:
    """Reserve `size` more bytes for a request, or refuse it if the others leave too few."""
    memory: BodyMemory = request.scope["sbert.body_memory"]
    is_small = request.scope["sbert.reserved_bytes"] + size <= _ALWAYS_BYTES
    if size > memory.free_bytes and not is_small:
        raise Problem("overloaded", "too many large requests at once: try again later", retry_after_s=1.0)
    memory.free_bytes -= size
    request.scope["sbert.reserved_bytes"] += size
