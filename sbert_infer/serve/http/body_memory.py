"""The memory of all bodies together, those of requests and of responses that are not read yet."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbert_infer.serve.wire.problems import Problem

logger = logging.getLogger(__name__)

_BODIES = 8  # of the largest size allowed
_LEAST_BYTES = 128 * 2**20
_ALWAYS_BYTES = 64 * 2**10  # for an ordinary request, however much large ones hold
_UNREAD_BYTES = 256 * 2**20  # of responses
_PIECE_BYTES = 64 * 2**10  # of a response to send at once: as much as is buffered before writing has to wait


class BodyMemory:
    """Middleware that releases what a request has reserved when the request ends."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self.free_bytes = max(_LEAST_BYTES, _BODIES * max_body_bytes)
        self._unread: dict[Callable[[], None], int] = {}  # by what ends the connection, the oldest first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        scope["sbert.body_memory"], scope["sbert.reserved_bytes"] = self, 0

        async def sending(message: Message) -> None:
            if len(message.get("body", b"")) <= _PIECE_BYTES:
                await send(message)
            else:
                await self._send_large(message, send, scope["sbert.abort"])

        try:
            await self._app(scope, receive, sending)
        finally:
            self.free_bytes += scope["sbert.reserved_bytes"]

    async def _send_large(self, message: Message, send: Send, abort: Callable[[], None]) -> None:
        """Send a body in pieces, as fast as its client reads: it is held until the last is sent."""
        body = memoryview(message["body"])
        self._unread[abort] = len(body)
        self._make_room()
        try:
            for start in range(0, len(body), _PIECE_BYTES):
                await send({**message, "body": body[start : start + _PIECE_BYTES], "more_body": True})
            await send({**message, "body": b""})  # waits for the last piece
        finally:
            self._unread.pop(abort, None)

    def _make_room(self) -> None:
        """End the connections that have been reading for longest, but not the last one."""
        while sum(self._unread.values()) > _UNREAD_BYTES and len(self._unread) > 1:
            abort = next(iter(self._unread))
            size = self._unread.pop(abort)
            logger.warning("gave up a response of %d bytes: its client reads too slowly while many wait", size)
            abort()


def reserve(request: Request, size: int) -> None:
    """Reserve `size` more bytes for a request, or refuse it if the others leave too few."""
    memory: BodyMemory = request.scope["sbert.body_memory"]
    is_small = request.scope["sbert.reserved_bytes"] + size <= _ALWAYS_BYTES
    if size > memory.free_bytes and not is_small:
        raise Problem("overloaded", "too many large requests at once: try again later", retry_after_s=1.0)
    memory.free_bytes -= size
    request.scope["sbert.reserved_bytes"] += size
