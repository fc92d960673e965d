"""Who may send requests: keys, needed on every route but the probes, and names of the server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.types import Scope

from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem

ADMIN = "/admin/"
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
# Basic makes a browser ask for a password, so that it can open the page. It comes first since
# Chromium reads only the first challenge.
_CHALLENGE = 'Basic realm="sbert-serve, the key is the password", charset="UTF-8", Bearer realm="sbert-serve"'
_PORT = re.compile(r":\d*$")


class Keys:
    """Valid keys."""

    def __init__(self, keys: Sequence[str]) -> None:
        spellings = {key.encode() for key in keys}
        for key in keys:  # how some clients send letters outside ASCII
            with suppress(UnicodeEncodeError):
                spellings.add(key.encode("latin-1"))
        self._digests = [_digest(spelling) for spelling in spellings]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, authorization: bytes, api_key: bytes = b"") -> bytes | None:
        """The digest of the valid key in one of these headers, or None.

        `authorization` has it as a bearer token or as the password of Basic, `api-key` as it is.
        """
        given = _digest(_key_in(authorization) if authorization else api_key.strip())
        found = [hmac.compare_digest(given, digest) for digest in self._digests]  # with all, in constant time
        return given if any(found) else None


class Access:
    """Decides about each request. Without keys, everything but `/admin/` is open."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        hosts = [host.lower() for host in settings.allowed_hosts]
        self._hosts = frozenset(host.strip("[]") for host in hosts)
        self._domains = tuple(host[1:] for host in hosts if host.startswith("*."))
        self.read()

    def read(self) -> None:
        """Read the files of keys, again if they have changed. If one is bad, nothing changes."""
        settings = self._settings
        keys = [*settings.keys, *(read_keys(settings.api_key_file) if settings.api_key_file else ())]
        admin = [*settings.admin_keys, *(read_keys(settings.admin_key_file) if settings.admin_key_file else ())]
        if set(keys) & set(admin):
            raise ValueError("a key is both an API key and an admin key: give admins keys of their own")
        self.keys, self.admin_keys = Keys(keys), Keys(admin)

    def check(self, scope: Scope) -> None:
        """Refuse a request without a valid key, or for another host."""
        if scope["path"] in OPEN_PATHS:
            return
        headers = scope["headers"]
        if self._hosts:
            self._check_host(first_header(headers, b"host"))
        authorization = first_header(headers, b"authorization")
        if scope["path"].startswith(ADMIN) and self.admin_keys:
            self._check_admin(authorization)
        elif self.keys:
            scope["sbert.key"] = self.keys.find(authorization, first_header(headers, b"api-key"))
            if scope["sbert.key"] is None:
                raise _no_key("API key")

    def _check_admin(self, authorization: bytes) -> None:
        if self.admin_keys.find(authorization):
            if not authorization.lower().startswith(b"bearer "):
                # A browser sends Basic by itself, even for a form on another site's page.
                raise Problem("forbidden", "send the admin key as a bearer token: Authorization: Bearer KEY")
        elif self.keys and self.keys.find(authorization):
            raise Problem("forbidden", "this needs an admin key (see --admin-key-file), and that is an API key")
        else:
            raise _no_key("admin key")

    def _check_host(self, given: bytes) -> None:
        """Refuse other names than the server's: a website may have given a browser its address."""
        host = _PORT.sub("", given.decode("latin-1").strip().lower()).rstrip(".").strip("[]")
        if host not in self._hosts and not host.endswith(self._domains):
            raise Problem("host_not_allowed", f"the host {host[:80]!r} is not served here: see --allowed-host")


def _no_key(kind: str) -> Problem:
    message = f"no valid {kind}: send the header Authorization: Bearer KEY"
    return Problem("invalid_api_key", message, headers={"www-authenticate": _CHALLENGE})


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
