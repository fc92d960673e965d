"""Requests that the queue would refuse anyhow: answered before anything is made of them.

With five times the load that can be served, that is what most requests are. The cheaper it is, the
more others get.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sbert_infer.errors import OverloadedError
from sbert_infer.serve.http.auth import Keys
from sbert_infer.serve.http.body import refuse
from sbert_infer.serve.http.request_log import CLIENT_LEFT, new_id, request_id
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.wire.problems import problem_of, respond

__all__ = ["Gate", "Refusal"]

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 1.0
_CURRENT_S = 0.005  # what the queue said is taken for true for so long
_MAX_BODY_BYTES = 64 * 2**10
_UNUSUAL = frozenset({b"expect", b"transfer-encoding", b"content-encoding", b"upgrade", b"origin"})


class Refusal(NamedTuple):
    """What one request gets."""

    error: OverloadedError
    path: str
    start: float  # when its headers had come
    head: bytes  # all but the end
    body: bytes

    def answer(self, close: bool) -> bytes:
        """All bytes of it."""
        return b"%s%s\r\n%s" % (self.head, b"connection: close\r\n" if close else b"", self.body)


class Gate:
    """Answers 429 on `paths`, which run a model, while no model would take one more text.

    Ordinary requests are refused by their connection, which asks `refusal`. What it passes on, a
    large body or a compressed one say, is refused here, as middleware: behind the check of the
    keys, and before the body is read.
    """

    def __init__(
        self, app: ASGIApp, paths: Collection[str], models: Models, keys: Keys, metrics: Metrics, max_body_bytes: int
    ) -> None:
        self._app, self._max_body_bytes = app, max_body_bytes
        self._routes, self._paths = frozenset(paths), {path.encode(): path for path in paths}
        self._models, self._keys, self._metrics = models, keys, metrics
        self._error: OverloadedError | None = None
        self._asked = 0.0  # when
        self._answers: dict[str, tuple[bytes, bytes]] = {}  # by path, while the error is the same
        self._unlogged = 0  # refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        runs = scope["method"] == "POST" and scope["path"] in self._routes
        if runs and (error := self._current()) is not None:
            self._models.count_refusal(error)
            response = await refuse(problem_of(error), Request(scope, receive), self._max_body_bytes)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @property
    def closing(self) -> bool:
        """Whether connections should end with their next answer."""
        return self._models.draining

    def refusal(self, method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Refusal | None:
        """What a request gets, if it is an ordinary one and must be refused. `note` what became of it."""
        path = self._paths.get(url)
        if path is None or method != b"POST" or (error := self._current()) is None:
            return None
        found = dict(reversed(headers))  # the first of a name counts
        length = found.get(b"content-length", b"")
        if not found.keys().isdisjoint(_UNUSUAL) or not length.isdigit() or int(length) > _MAX_BODY_BYTES:
            return None
        if not self._keys.admit(path, found.get(b"authorization", b"")):
            return None
        return self._refusal(error, path, request_id(headers))

    def refusal_again(self, path: str) -> Refusal | None:
        """As `refusal`, for a request with the same head as one that got one. Keys don't change."""
        return None if (error := self._current()) is None else self._refusal(error, path, new_id())

    def note(self, refusal: Refusal, *, sent: bool) -> None:
        """Count a refusal, and see that the log tells of it."""
        status = HTTPStatus.TOO_MANY_REQUESTS if sent else CLIENT_LEFT
        self._models.count_refusal(refusal.error)
        self._metrics.note_answer(refusal.path, status, time.monotonic() - refusal.start)
        if not self._unlogged:
            asyncio.get_running_loop().call_later(_LOG_EVERY_S, self._log)
        self._unlogged += 1

    def _log(self) -> None:
        """One line for all: thousands a second would cost more than the refusals."""
        logger.warning("refused %d requests: too many wait", self._unlogged)
        self._unlogged = 0

    def _current(self) -> OverloadedError | None:
        now = time.monotonic()
        if now - self._asked > _CURRENT_S:
            self._error, self._asked = self._models.refusal(), now
            self._answers.clear()
        return self._error

    def _refusal(self, error: OverloadedError, path: str, id: str) -> Refusal:
        head, body = self._answers.get(path) or self._make(error, path)
        return Refusal(error, path, time.monotonic(), b"%sx-request-id: %s\r\n" % (head, id.encode()), body)

    def _make(self, error: OverloadedError, path: str) -> tuple[bytes, bytes]:
        response = respond(problem_of(error), path)
        status = HTTPStatus(response.status_code)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"date: " + formatdate(usegmt=True).encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self._answers[path] = answer = b"\r\n".join([*lines, b""]), bytes(response.body)
        return answer
