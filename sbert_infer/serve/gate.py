"""Requests that the queue would refuse anyhow: answered by the connection, before anything is made of them.

With five times the load that can be served, that is what most requests are. The cheaper it is, the more others get.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from email.utils import formatdate
from http import HTTPStatus

from ..errors import OverloadedError
from .keys import Keys
from .metrics import Metrics
from .models import Models
from .problems import problem_of, respond
from .watch import request_id

__all__ = ["Gate"]

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 1.0
_CURRENT_S = 0.005  # what the queue said is taken for true for so long
_MAX_BODY_BYTES = 64 * 2**10  # more is for those who count what they read
_UNUSUAL = frozenset({b"expect", b"transfer-encoding", b"content-encoding", b"upgrade", b"origin"})


class Gate:
    """Answers 429 on `paths`, which run a model, while no model would take one more text."""

    def __init__(self, paths: Collection[str], models: Models, keys: Keys, metrics: Metrics) -> None:
        self._paths = {path.encode(): path for path in paths}
        self._models, self._keys, self._metrics = models, keys, metrics
        self._refusal: OverloadedError | None = None
        self._asked = 0.0  # when
        self._unlogged = 0  # refusals
        self._answers: dict[str, tuple[bytes, bytes]] = {}  # by path, while the refusal is the same

    def answer(self, method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """All bytes of a refusal, or none: then the request is to be passed on, as is every one that is unusual."""
        refusal = self._current()
        path = self._paths.get(url)
        if refusal is None or path is None or method != b"POST":
            return None
        found = dict(headers)
        length = found.get(b"content-length", b"")
        if not found.keys().isdisjoint(_UNUSUAL) or not length.isdigit() or int(length) > _MAX_BODY_BYTES:
            return None
        if not self._keys.admit(path, found.get(b"authorization", b"").decode("latin-1")):
            return None
        self._note(refusal, path)
        head, body = self._answers.get(path) or self._make(refusal, path)
        closing = b"connection: close\r\n" if self._models.draining else b""
        return b"%sx-request-id: %s\r\n%s\r\n%s" % (head, request_id(headers).encode(), closing, body)

    def _current(self) -> OverloadedError | None:
        now = time.monotonic()
        if now - self._asked > _CURRENT_S:
            self._refusal, self._asked = self._models.refusal(), now
            self._answers.clear()
        return self._refusal

    def _note(self, refusal: OverloadedError, path: str) -> None:
        self._models.count_refusal(refusal)
        self._metrics.note_answer(path, HTTPStatus.TOO_MANY_REQUESTS, 0.0)
        if not self._unlogged:
            asyncio.get_running_loop().call_later(_LOG_EVERY_S, self._log)
        self._unlogged += 1

    def _log(self) -> None:
        """One line for all: thousands a second would cost as much as the refusals."""
        logger.warning("refused %d requests before reading them: too many wait", self._unlogged)
        self._unlogged = 0

    def _make(self, refusal: OverloadedError, path: str) -> tuple[bytes, bytes]:
        response = respond(problem_of(refusal), path)
        status = HTTPStatus(response.status_code)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"date: " + formatdate(usegmt=True).encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self._answers[path] = answer = b"\r\n".join([*lines, b""]), bytes(response.body)
        return answer
