"""Who sends a request, and how soon it needs a response: what the queue of a model asks."""

from __future__ import annotations

from typing import TypedDict

from starlette.requests import Request

from sbert_infer.serve.http.auth import first_header
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.types import BULK, INTERACTIVE, Priority

HEADER = "x-priority"
_PRIORITIES: dict[bytes, Priority] = {INTERACTIVE.encode(): INTERACTIVE, BULK.encode(): BULK}


class Caller(TypedDict):
    """Arguments of all calls of an engine that go through its queue."""

    priority: Priority | None  # None: by size
    key: bytes | None  # the digest of the API key; None if the server has no keys


def may_wait(request: Request, urgency: float | None) -> None:
    """Note that a request is bulk, if its body says so. The header X-Priority comes first."""
    request.scope["sbert.may_wait"] = urgency is not None and urgency > 0


def caller_of(request: Request) -> Caller:
    """Read who sends a request. Its key must have been checked."""
    headers = request.scope["headers"]
    priority: Priority | None = BULK if request.scope.get("sbert.may_wait") else None
    if any(name == HEADER.encode() for name, _ in headers):
        given = first_header(headers, HEADER.encode()).strip().lower()
        priority = _PRIORITIES.get(given)
        if priority is None:
            shown = given[:80].decode("latin-1")
            raise Problem("invalid_header", f"the header X-Priority must be interactive or bulk, got {shown!r}")
    return {"priority": priority, "key": request.scope.get("sbert.key")}
