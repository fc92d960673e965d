"""Reading a request's body, and noticing that its client has left.

Bodies are bounded in bytes, also after decompression, and in time.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from sbert_infer.serve.http.body_memory import reserve
from sbert_infer.serve.settings import MAX_INPUTS, Settings
from sbert_infer.serve.wire.problems import Problem, respond

Result = TypeVar("Result")
Wanted = TypeVar("Wanted")

# A client gets more time for each byte that has come: a large body may take long, but a trickle or
# a pause may not.
_SLOWEST_BYTES_PER_S = 16 * 2**10
_DRAIN_S = 2.0  # for the rest of a refused body
_PIECE_BYTES = 2**18  # of decompressed data to make at once
_PACKED_BYTES = 2**14  # of compressed data to read at once: what follows a member is copied
_MAX_MEMBERS = 1024  # of a gzip body; each takes 20 bytes and some microseconds
_SEARCHED_BYTES = 2**20  # of a broken body, for what is wrong with it
_MAX_QUOTES = 2 * (MAX_INPUTS + 100)  # that are not escaped: two for each input, and for each field
# A high surrogate without a low one after it, or a low one without a high one before it.
_SURROGATE = re.compile(
    rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(?<!\\)\\u[dD][c-fC-F]"
)
_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)


class ClientLeft(Exception):  # noqa: N818  not an error of the server
    """The client closed the connection before it had its response."""


async def read_body(request: Request, settings: Settings) -> bytes:
    """Read the body, and decompress it."""
    headers = dict(request.scope["headers"])
    _check_type(headers)
    inflate = _Inflate() if _is_compressed(headers.get(b"content-encoding", b"")) else None
    if int(headers.get(b"content-length") or 0) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes)
    body, received, start, more = bytearray(), 0, time.monotonic(), True
    while more:
        now = time.monotonic()
        until = min(start + received / _SLOWEST_BYTES_PER_S, now) + settings.read_timeout_s
        message = await _receive(request, until)
        more, chunk = message.get("more_body", False), message.get("body", b"")
        received += len(chunk)
        for piece in inflate(chunk) if inflate else (chunk,):
            reserve(request, len(piece))
            body += piece
            if max(received, len(body)) > settings.max_body_bytes:
                raise _too_large(settings.max_body_bytes, " after decompression" if inflate else "")
            if inflate:
                await asyncio.sleep(0)  # let other requests run, even if the piece is empty
    if inflate:
        inflate.finish()
    return bytes(body)


async def refuse(problem: Problem, request: Request, max_body_bytes: int) -> Response:
    """Make the response to a refused request. Its body is read first, or clients may not see it."""
    if not await _drain(request, max_body_bytes):
        problem.headers["connection"] = "close"
    return respond(problem, request.url.path)


async def _drain(request: Request, max_bytes: int) -> bool:
    """Read and drop the rest of a body. Return whether it ended in time."""
    if request.scope.get("sbert.body_read") or request.headers.get("expect"):
        return bool(request.scope.get("sbert.body_read"))
    until, received = time.monotonic() + _DRAIN_S, 0
    try:
        while received <= max_bytes:
            message = await _receive(request, until)
            received += len(message.get("body", b""))
            if not message.get("more_body", False):
                return True
    except Problem:  # it took too long
        return False
    return False


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, which is cancelled if the client leaves. The body must have been read."""
    interruption = _Interruption()
    lost = request.scope["sbert.when_lost"]  # callbacks: two more tasks would cost a tenth of a request
    lost.add(interruption)
    try:
        return await work
    except asyncio.CancelledError:
        if interruption.happened:
            raise ClientLeft from None
        raise
    finally:
        lost.discard(interruption)


def decode(body: bytes, wanted: type[Wanted]) -> Wanted:
    """Decode a JSON body, or raise a problem that names the field."""
    if not body.strip():
        raise Problem("invalid_json", "the body is empty: send JSON")
    if body.count(b'"') - body.count(b'\\"') > _MAX_QUOTES:  # before millions of strings are made
        raise Problem("too_many_inputs", f"at most {MAX_INPUTS} inputs in a request")
    try:
        return msgspec.json.decode(body, type=wanted)
    except msgspec.ValidationError as error:
        message = str(error)
        code = "invalid_request"
        if "length >= 1" in message:
            code = "empty_input"
        elif "`array` of length <=" in message:
            code = "too_many_inputs"
        message = message.replace("$.", "").replace("`float` >= 1.0", "a whole number of at least 1")
        raise Problem(code, message, param=_field(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _SURROGATE.search(body, 0, _SEARCHED_BYTES):
            raise Problem("invalid_json", "the body has half a character: a lone surrogate such as \\ud800") from None
        raise Problem("invalid_json", f"the body is not JSON: {error}") from None
    except RecursionError:
        raise Problem("invalid_json", "the body is nested too deeply") from None


class _Inflate:
    """Decompresses gzip, one chunk at a time."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)
        self._members = 1

    def __call__(self, chunk: bytes) -> Iterator[bytes]:
        """Decompress a chunk in pieces, some of which may be empty.

        A chunk may hold a thousand times as many bytes, or thousands of members without any.
        """
        try:
            for start in range(0, len(chunk), _PACKED_BYTES):
                packed = chunk[start : start + _PACKED_BYTES]
                while packed:
                    if self._member.eof:  # another member may follow, as in concatenated files
                        self._begin_member()
                    yield self._member.decompress(packed, _PIECE_BYTES)
                    packed = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
        except zlib.error as error:
            raise Problem("invalid_json", f"the body is not gzip: {error}") from None

    def _begin_member(self) -> None:
        self._member = zlib.decompressobj(wbits=31)
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise Problem("invalid_json", f"the body has more than {_MAX_MEMBERS} gzip members: compress it as one")

    def finish(self) -> None:
        """Raise a problem if the last member is not complete."""
        if not self._member.eof:
            raise Problem("invalid_json", "the compressed body ends too early")


async def _receive(request: Request, until: float) -> Message:
    if request.scope.get("sbert.has_come"):  # mostly together with the headers
        message = await request.receive()
    else:
        message = await _receive_until(request, until)
    if message["type"] == "http.disconnect":
        raise ClientLeft
    request.scope["sbert.body_read"] = not message.get("more_body", False)
    return message


async def _receive_until(request: Request, until: float) -> Message:
    interruption = _Interruption()
    timer = asyncio.get_running_loop().call_later(max(0.0, until - time.monotonic()), interruption)
    try:
        return await request.receive()
    except asyncio.CancelledError:
        if interruption.happened:
            late = "the body did not come in time"
            raise Problem("request_timeout", late, headers={"connection": "close"}) from None
        raise
    finally:
        timer.cancel()


class _Interruption:
    """Cancels the task that made it when called. `happened` tells that from other cancellations."""

    def __init__(self) -> None:
        self.happened = False
        self._task = asyncio.current_task()

    def __call__(self) -> None:
        if self._task is not None:
            self.happened = True
            self._task.cancel()


def _check_type(headers: dict[bytes, bytes]) -> None:
    """Refuse what is not declared as JSON: without that, a page of any website could send it.

    A page can't send a key without asking first, so with one the type may be missing, as litellm
    leaves it out for Voyage. (Basic does not count: a browser sends that by itself.)
    """
    given = headers.get(b"content-type", b"").decode("latin-1")
    has_key = b"api-key" in headers or headers.get(b"authorization", b"").lower().startswith(b"bearer ")
    if not _JSON.match(given) and (given or not has_key):
        message = f"send the body as Content-Type: application/json, not {given[:80] or 'without a type'}"
        raise Problem("unsupported_media_type", message)


def _is_compressed(given: bytes) -> bool:
    encoding = given.decode("latin-1").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", ""):
        message = f"Content-Encoding {encoding[:40]!r} is not supported: use gzip, or none"
        raise Problem("unsupported_media_type", message, headers={"accept-encoding": "gzip"})
    return encoding.endswith("gzip")


def _too_large(max_bytes: int, when: str = "") -> Problem:
    message = f"the body has more than {max_bytes} bytes{when}: send fewer texts at once (see --max-body-bytes)"
    return Problem("body_too_large", message)


def _field(message: str) -> str | None:
    found = re.search(r"at `\$\.(\w+)|field `(\w+)`", message)
    return (found[1] or found[2]) if found else None
