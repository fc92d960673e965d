"""Memory for what clients send: a body is bounded by itself, and here all bodies together."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sbert_infer.serve.wire.problems import Problem

__all__ = ["Room", "take_room"]

_BODIES = 8  # of the largest size allowed
_LEAST_BYTES = 128 * 2**20
_ALWAYS_BYTES = 64 * 2**10  # an ordinary request is let in, whatever large ones hold


class Room:
    """Middleware that frees what the body of a request took when the request is answered."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self.free_bytes = max(_LEAST_BYTES, _BODIES * max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        scope["sbert.room"], scope["sbert.room_taken"] = self, 0
        try:
            await self._app(scope, receive, send)
        finally:
            self.free_bytes += scope["sbert.room_taken"]


def take_room(request: Request, size: int) -> None:
    """Count `size` bytes more for a request, or refuse it if the others have left too few."""
    room: Room = request.scope["sbert.room"]
    is_small = request.scope["sbert.room_taken"] + size <= _ALWAYS_BYTES
    if size > room.free_bytes and not is_small:
        raise Problem("overloaded", "too many large requests at once: try again later", retry_after_s=1.0)
    room.free_bytes -= size
    request.scope["sbert.room_taken"] += size
