"""Who sends a request, and how soon it needs a response: what the queue of a model asks."""

from __future__ import annotations

from typing import TypedDict

from starlette.requests import Request

from sbert_infer.serve.http.auth import first_header
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.types import BULK, INTERACTIVE, Priority

HEADER = "x-priority"
_PRIORITIES: dict[bytes, Priority | None] = {
    b"": None,
    INTERACTIVE.encode(): INTERACTIVE,
    BULK.encode(): BULK,
}


class Caller(TypedDict):
    """Arguments of all calls of an engine that go through its queue."""

    priority: Priority | None  # None: by size
    key: bytes | None  # the digest of the API key; None if the server has no keys


def caller_of(request: Request) -> Caller:
    """Read who sends a request. Its key must have been checked."""
    given = first_header(request.scope["headers"], HEADER.encode()).strip().lower()
    if given not in _PRIORITIES:
        shown = given[:80].decode("latin-1")
        raise Problem("invalid_header", f"the header X-Priority must be interactive or bulk, got {shown!r}")
    return {"priority": _PRIORITIES[given], "key": request.scope.get("sbert.key")}
