"""API keys, needed on every route but the probes."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.types import Scope

from sbert_infer.serve.wire.problems import Problem

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
# Basic makes a browser ask for a password, so that it can open the page. It comes first since
# Chromium reads only the first challenge.
_CHALLENGE = 'Basic realm="sbert-serve, the key is the password", charset="UTF-8", Bearer realm="sbert-serve"'


class Keys:
    """All valid keys; if there are none, every request is admitted."""

    def __init__(self, keys: Sequence[str]) -> None:
        spellings = {key.encode() for key in keys}
        for key in keys:  # how some clients send letters outside ASCII
            with suppress(UnicodeEncodeError):
                spellings.add(key.encode("latin-1"))
        self._digests = [_digest(spelling) for spelling in spellings]

    def admit(self, path: str, authorization: bytes, api_key: bytes = b"") -> bool:
        """Whether one of these headers has a valid key.

        `authorization` has it as a bearer token or as the password of Basic, `api-key` as it is.
        """
        if not self._digests or path in OPEN_PATHS:
            return True
        given = _digest(_key_in(authorization) if authorization else api_key.strip())
        return any([hmac.compare_digest(given, digest) for digest in self._digests])  # noqa: C419  compare with all, in constant time

    def check(self, scope: Scope) -> None:
        """Refuse a request without a valid key."""
        headers = scope["headers"]
        if not self.admit(scope["path"], first_header(headers, b"authorization"), first_header(headers, b"api-key")):
            message = "no valid API key: send the header Authorization: Bearer KEY"
            raise Problem("invalid_api_key", message, headers={"www-authenticate": _CHALLENGE})


def read_keys(path: Path) -> list[str]:
    """Read keys, one a line. Empty lines and those that begin with # are skipped."""
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
    """Hash a key: all digests have the same length, so that not even that can be timed."""
    return hashlib.sha256(key).digest()
