"""One client's connection: uvicorn's, with bounds on what a client can hold without sending or reading anything."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sbert_infer.serve.http.admission import Gate, Refusal
from sbert_infer.serve.http.body import DRAIN_S
from sbert_infer.serve.http.same_head import SameHead
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.schemas import TeiError

__all__ = ["Connection", "connection_class"]

_MAX_HEADER_BYTES = 64 * 2**10
_LAST_REQUEST_S = 0.5
_SLOWEST_BYTES_PER_S = 16 * 2**10  # that a client may read at
_MAX_COPIED_BYTES = 64 * 2**10  # to save a system call
_CONTINUE = b"HTTP/1.1 100 "


class Connection(HttpToolsProtocol):
    """Ends if headers are late or too long, if there are too many connections, or if nobody reads its answer.

    What the gate refuses is answered here, and never becomes a request to the application.
    """

    settings: Settings  # of the subclass that `connection_class` makes
    gate: Gate  # as well
    _passes_on = False  # the request that comes in
    _refusal: Refusal | None = None  # that it gets instead, when all of it has come
    _header_bytes = 0  # and of all else that is no body: trailers, extensions of chunks
    _between = True  # requests: the next byte begins one
    _refused: Refusal | None = None  # what the last request got, if it was refused here
    _same_head: SameHead | None = None  # of one that was, and its path
    _same_path = ""
    _in_headers = False  # some of a request's headers have come, and not all
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._when_lost: set[Callable[[], None]] = set()
        if len(self.connections) > self.settings.max_connections:
            self._end(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections: try again later", "Overloaded")
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        _cancel(self._header_timer)
        _cancel(self._write_timer)
        _cancel(self._close_timer)
        if self._refusal is not None:
            self.gate.note(self._refusal, sent=False)
            self._refusal = None
        super().connection_lost(exc)
        for call in list(self._when_lost):
            call()

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request. Counted here, since the parser tells of a header only when it has all of it."""
        if self._same_head is not None and self._refuse_again(self._same_head, data):
            return
        whole, self._refused = data if self._between else b"", None
        self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        while data:
            data = self._parse(data)
        if self._header_timer is None and self._waits_for_client():  # mostly headers come in one piece
            self._expect_headers()
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._end_for_headers()
        if whole and self._refused is not None and self._same_head is None:
            self._same_head, self._same_path = SameHead.of(whole), self._refused.path

    def _parse(self, data: bytes) -> bytes:
        """Gives what is to be parsed once more.

        Java's clients, say, begin with a request that wishes for HTTP/2, which a server may ignore.
        The parser would leave out its body, so a new one gets it that does not know of the wish.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":  # which is nothing else than that wish
                self._end(HTTPStatus.BAD_REQUEST, "this server is no proxy", "Validation")
                return b""
            again = self._without_upgrade() + data[upgrade.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
            return again
        except httptools.HttpParserError:
            self._end(HTTPStatus.BAD_REQUEST, "this is not HTTP", "Validation")
        return b""

    def _without_upgrade(self) -> bytes:
        """The head of the request that has come, with no wish for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._between = False
        self._unset_keepalive_if_required()  # one before it, in the same piece, may have been refused
        self._header_bytes = 0
        self._in_headers = True
        self._expect_no_headers()

    def on_headers_complete(self) -> None:
        """The application takes over, with a time limit of its own for the body; or nobody needs to."""
        self._header_bytes = 0
        self._in_headers = False
        self._expect_no_headers()
        self._refusal, self._passes_on = None, False
        if _size(self.headers) > _MAX_HEADER_BYTES:  # what came with the first byte was not counted
            self._end_for_headers()
        if self.parser.should_upgrade():
            return  # it comes again, or is refused
        self._refusal = self._refusal_in_advance()
        self._passes_on = self._refusal is None and not self.transport.is_closing()
        if self._passes_on:
            self.scope["sbert.when_lost"] = self._when_lost  # type: ignore[typeddict-unknown-key]
            super().on_headers_complete()
            if self.scope["method"] != "HEAD":  # whose head is all that there is
                self.cycle.transport = _HeadWithBody(self.transport)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        """All of a request."""
        self._between = True
        if self._refusal is not None:
            self._refuse(self._refusal, close=False)
        if not self._passes_on:
            return
        self.scope["sbert.has_come"] = True  # type: ignore[typeddict-unknown-key]
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # it was paused if the body was large, and a client may leave

    def on_body(self, body: bytes) -> None:
        """Some of the body, which the application counts."""
        self._header_bytes = 0
        if self._passes_on:
            super().on_body(body)

    def shutdown(self) -> None:
        """The server is about to end. A request may be on its way: it is answered, if it comes soon."""
        if self._refusal is not None:
            self._refuse(self._refusal, close=True)
        elif self._is_answered:
            self.loop.call_later(_LAST_REQUEST_S, super().shutdown)
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer is written."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client has read most of it; the rest is watched on."""
        super().resume_writing()
        self._watch_writing()

    def _waits_for_client(self) -> bool:
        """Whether it is a client's turn, and no other timer runs: bytes that begin no request end uvicorn's own."""
        if self.pipeline or self.transport.is_closing():
            return False
        idles = self._is_answered and self.timeout_keep_alive_task is None
        return self._in_headers or self._refusal is not None or idles

    def _refusal_in_advance(self) -> Refusal | None:
        """What the gate says, if the connection itself may answer: nothing is before it, or waits to be read."""
        if not self._may_answer() or not self.parser.should_keep_alive() or self.parser.get_http_version() != "1.1":
            return None
        return self.gate.refusal(self.parser.get_method(), self.url, self.headers)

    @property
    def _is_answered(self) -> bool:
        """Whether no request that was passed on waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _may_answer(self) -> bool:
        return self._is_answered and not self.flow.write_paused and not self.transport.is_closing()

    def _refuse_again(self, head: SameHead, data: bytes) -> bool:
        """Refuse a request like one before, without a look at its head.

        Clients repeat themselves: at five times the load this takes 11 % off the event loop's time,
        and 3 % more work gets done.
        """
        idle = self._between and self.timeout_keep_alive_task is not None  # and no other timer runs
        if not idle or not head.begins(data) or not self._may_answer() or self.gate.closing:
            return False
        refusal = self.gate.refusal_again(self._same_path)
        if refusal is None:
            return False
        self.transport.write(refusal.answer(close=False))
        self.gate.note(refusal, sent=True)
        self._refused = refusal
        return True

    def _refuse(self, refusal: Refusal, close: bool) -> None:
        self._refusal, self._refused = None, refusal
        self._expect_no_headers()
        close = close or self.gate.closing
        self.transport.write(refusal.answer(close))
        self.gate.note(refusal, sent=True)
        if close:
            self._close()
        self.on_response_complete()

    def _expect_headers(self) -> None:
        """Or the rest of a body that nobody wants: not for long."""
        if self._refusal is None:
            self._header_timer = self.loop.call_later(self.settings.read_timeout_s, self.transport.abort)
        else:
            self._header_timer = self.loop.call_later(DRAIN_S, self._refuse, self._refusal, True)

    def _expect_no_headers(self) -> None:
        _cancel(self._header_timer)
        self._header_timer = None

    def _watch_writing(self) -> None:
        """Look again later, and give up if the client has read hardly anything meanwhile."""
        _cancel(self._write_timer)
        unread = self.transport.get_write_buffer_size()
        wanted = min(unread, _SLOWEST_BYTES_PER_S * self.settings.write_timeout_s)

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left > unread - wanted:
                self.transport.abort()
            elif left:
                self._watch_writing()

        self._write_timer = self.loop.call_later(self.settings.write_timeout_s, look)

    def timeout_keep_alive_handler(self) -> None:
        """Nothing has come for long, unless it was refused without a look at it."""
        idle_s = math.inf if self._refused is None else time.monotonic() - self._refused.start
        if idle_s < self.timeout_keep_alive and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive - idle_s, self.timeout_keep_alive_handler
            )
        else:
            self._close()

    def _close(self) -> None:
        """When all is sent; but a client that does not read is not waited for."""
        if not self.transport.is_closing():
            self.transport.close()
            self._close_timer = self.loop.call_later(self.settings.write_timeout_s, self.transport.abort)

    def _end_for_headers(self) -> None:
        message = f"the headers have more than {_MAX_HEADER_BYTES} bytes"
        self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, "Validation")

    def _end(self, status: HTTPStatus, message: str, error_type: str) -> None:
        """Answer before there is a request to pass on, and close. What follows gets no answer."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(TeiError(message, error_type))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += "retry-after: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        self.transport.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self._close()


class _HeadWithBody:
    """The transport as uvicorn's answer to one request sees it: the head waits for the beginning of the body.

    Two writes would be two system calls, each of which wakes the client.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""  # none yet; None if it is sent

    def write(self, data: bytes) -> None:
        """Send some of the answer."""
        if self._head == b"" and not data.startswith(_CONTINUE):
            self._head = data
            return
        if self._head:
            if len(data) > _MAX_COPIED_BYTES:
                self._transport.write(self._head)
            else:
                data = self._head + data
            self._head = None
        self._transport.write(data)

    def close(self) -> None:
        """Send what there is, and close."""
        if self._head:
            self._transport.write(self._head)
            self._head = None
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._transport.is_closing()


def connection_class(settings: Settings, gate: Gate) -> type[Any]:
    """The class of the connections of one server: uvicorn makes them itself."""
    return type("Connection", (Connection,), {"settings": settings, "gate": gate})


def _size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
