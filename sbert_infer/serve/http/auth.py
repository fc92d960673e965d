"""Who may ask: API keys, on every route but the probes."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sbert_infer.serve.http.body import refuse
from sbert_infer.serve.wire.problems import Problem

__all__ = ["OPEN_PATHS", "KeyCheck", "Keys", "first_header", "read_keys"]

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
# A browser asks for a password by itself if Basic is offered, and so can open the page. Chromium
# reads only the first.
_CHALLENGE = 'Basic realm="sbert-serve, the key is the password", charset="UTF-8", Bearer realm="sbert-serve"'


class Keys:
    """All keys; if there are none, everybody has one."""

    def __init__(self, keys: Sequence[str]) -> None:
        spellings = {key.encode() for key in keys}
        for key in keys:  # letters outside ASCII: some clients send them in this way
            with suppress(UnicodeEncodeError):
                spellings.add(key.encode("latin-1"))
        self._digests = [_digest(spelling) for spelling in spellings]

    def admit(self, path: str, authorization: bytes) -> bool:
        """Whether a request may go on that has a key in this header, as a bearer token or as the password of Basic."""
        if not self._digests or path in OPEN_PATHS:
            return True
        given = _digest(_key_in(authorization))
        return any([hmac.compare_digest(given, digest) for digest in self._digests])  # noqa: C419  all, in constant time


class KeyCheck:
    """Middleware that lets only those in who have one of the keys."""

    def __init__(self, app: ASGIApp, keys: Keys, max_body_bytes: int) -> None:
        self._app, self._keys, self._max_body_bytes = app, keys, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if self._keys.admit(scope["path"], first_header(scope["headers"], b"authorization")):
            await self._app(scope, receive, send)
            return
        message = "no valid API key: send the header Authorization: Bearer KEY"
        problem = Problem("invalid_api_key", message, headers={"www-authenticate": _CHALLENGE})
        response = await refuse(problem, Request(scope, receive), self._max_body_bytes)
        await response(scope, receive, send)


def read_keys(path: Path) -> list[str]:
    """One key a line; empty lines and those that begin with # don't count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} holds no key: write one a line")
    return keys


def first_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The value of the first header of this name, in lower case, or nothing."""
    for found, value in headers:
        if found == name:
            return value
    return b""


def _key_in(authorization: bytes) -> bytes:
    scheme, _, value = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that not even that can be timed."""
    return hashlib.sha256(key).digest()
