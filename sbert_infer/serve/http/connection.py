"""One client's connection: uvicorn's, with bounds on clients that send or read too slowly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sbert_infer.serve.http.request_log import POLLED, Record, RequestLog, new_record
from sbert_infer.serve.http.transport import CONTINUE, Flow, HeadWithBody
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.schemas import TeiError

_MAX_HEADER_BYTES = 64 * 2**10
_LAST_REQUEST_S = 0.5  # for a request that is on its way when the server stops
_SLOWEST_BYTES_PER_S = 16 * 2**10  # at which a client may read
# To parse at once. The shortest request has 18 bytes, so that no more than 57 of a connection can
# wait for their turn, however many a client sends without reading the responses.
_PIECE_BYTES = 1024
_SPARES = 64  # connections beyond the limit, which wait to say whether they are probes
_SPARE_S = 1.0  # for them to say so
_PROBES = frozenset(path.encode() for path in POLLED)
_STILL_THERE_S = 1.0  # between looks for a client that sends no more


class Connection(HttpToolsProtocol):
    """Ends if headers are late or too long, if a response is not read, or if it is one too many."""

    settings: Settings  # this and the next two are set by the subclass that `connection_class` makes
    log: RequestLog
    spares: dict[Connection, None]  # the oldest first
    _is_spare = False  # whether it is beyond the limit, and may send a probe only
    _client_ended = False  # whether the client sends no more, but may wait for responses
    _passes_on = False  # whether the request being read goes to the application
    _header_bytes = 0  # of headers and all else that is not body: trailers, chunk extensions
    _in_headers = False  # whether a request's headers have begun and not ended
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _close_timer: asyncio.TimerHandle | None = None
    _client_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers; for a short time if it is one connection too many."""
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        self._unparsed = bytearray()
        self._when_lost: set[Callable[[], None]] = set()
        if len(self.connections) > self.settings.max_connections:
            self._wait_as_spare()
        else:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and the work for a client that has left."""
        for timer in (self._header_timer, self._write_timer, self._close_timer, self._client_timer):
            _cancel(timer)
        self.spares.pop(self, None)
        self._unparsed.clear()
        super().connection_lost(exc)
        for call in list(self._when_lost):
            call()

    def data_received(self, data: bytes) -> None:
        """Parse some bytes, as soon as no request waits for the responses to those before it."""
        self._unparsed += data
        self._read_on()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for the response, if the client has sent a whole request.

        A client that has left looks the same at first, so it is looked for. TLS ends both ways.
        """
        if self._is_answered or self._in_headers or self.cycle.more_body or self.scheme == "https":
            return False
        if not self._client_ended:
            self._client_ended = True
            self._client_timer = self.loop.call_later(_STILL_THERE_S, self._look_for_client)
        self.flow.hold(True)  # there is nothing more to read
        return True

    def on_response_complete(self) -> None:
        """Go on with the next request, or close if the client sends no more."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._read_on()
        if self._client_ended and self._is_answered:
            self._close()

    def _read_on(self) -> None:
        """Parse what has come until a request has to wait, and read no more while it waits."""
        while self._unparsed and not self.pipeline and not self.transport.is_closing():
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            self._parse_piece(piece)
        if self.transport.is_closing():
            self._unparsed.clear()
            return
        if self._header_timer is None and self._waits_for_client():  # mostly headers come in one piece
            self._expect_headers()
        self.flow.hold(bool(self._unparsed) or self._client_ended)

    def _parse_piece(self, data: bytes) -> None:
        """Count and parse some bytes: the parser reports a header only once it is complete."""
        self._header_bytes += len(data)
        self._unset_keepalive_if_required()
        while data:
            data = self._parse(data)
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._end_for_headers()

    def _parse(self, data: bytes) -> bytes:
        """Return what has to be parsed once more.

        Some clients, Java's for example, begin by asking for an upgrade to HTTP/2, which a server
        may ignore. The parser would drop the body of such a request, so a new parser gets the
        request without that header.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":  # nothing but a request for an upgrade
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
        """The head of the current request, without the header that asks for another protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Start counting headers at the first byte of a request."""
        super().on_message_begin()
        self._header_bytes = 0
        self._in_headers = True
        self._expect_no_headers()

    def on_headers_complete(self) -> None:
        """Pass the request on to the application, which limits the time for the body."""
        self._header_bytes = 0
        self._in_headers = False
        self._expect_no_headers()
        if _size(self.headers) > _MAX_HEADER_BYTES:  # what came with the first byte was not counted
            self._end_for_headers()
        if self._is_spare:
            self._admit_probe()
        # A request for an upgrade is parsed again without it, or refused.
        self._passes_on = not self.parser.should_upgrade() and not self.transport.is_closing()
        if self._passes_on:
            self.scope["sbert.when_lost"] = self._when_lost  # type: ignore[typeddict-unknown-key]
            self.scope["sbert.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
            super().on_headers_complete()
            self.cycle.keep_alive = self.cycle.keep_alive and not self._is_spare
            has_body = self.scope["method"] != "HEAD"
            self.cycle.transport = HeadWithBody(self.transport, has_body)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        """Note that all of a request has come."""
        if not self._passes_on:
            return
        self.scope["sbert.has_come"] = True  # type: ignore[typeddict-unknown-key]
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # a large body pauses it, and a disconnect is only seen while reading

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body, whose size the application checks."""
        self._header_bytes = 0
        if self._passes_on:
            super().on_body(body)

    def shutdown(self) -> None:
        """Close in half a second if idle, since a request may be on its way."""
        if self._is_answered:
            self.loop.call_later(_LAST_REQUEST_S, super().shutdown)
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        self._close()

    def pause_writing(self) -> None:
        """Start watching a client that reads more slowly than the response is written."""
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        """Go on writing, and keep watching until the client has read the rest."""
        super().resume_writing()
        self._watch_writing()

    @property
    def _is_answered(self) -> bool:
        """Whether every request that was passed on has its response."""
        return self.cycle is None or self.cycle.response_complete

    def _waits_for_client(self) -> bool:
        """Whether it is the client's turn and no timer runs: stray bytes cancel uvicorn's."""
        if self.pipeline or self.transport.is_closing():
            return False
        return self._in_headers or (self._is_answered and self.timeout_keep_alive_task is None)

    def _expect_headers(self) -> None:
        """Start the timeout for headers."""
        self._header_timer = self.loop.call_later(self.settings.read_timeout_s, self.transport.abort)

    def _expect_no_headers(self) -> None:
        """Stop the timeout for headers."""
        _cancel(self._header_timer)
        self._header_timer = None

    def _wait_as_spare(self) -> None:
        """Wait for a probe, which is answered in any crowd, or else an orchestrator would kill us.

        The spare that has waited longest makes room: a probe is sent as soon as it is connected.
        """
        self._is_spare = True
        self.spares[self] = None
        self._header_timer = self.loop.call_later(_SPARE_S, self._refuse_silent_spare)
        if len(self.spares) > _SPARES:
            next(iter(self.spares))._refuse_spare()

    def _refuse_silent_spare(self) -> None:
        """Refuse a spare soon: after a pause of the machine, what it has sent is yet to be read."""
        self._header_timer = self.loop.call_later(_SPARE_S / 10, self._refuse_spare)

    def _refuse_spare(self) -> None:
        self.spares.pop(self, None)
        self._end(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections: try again later", "Overloaded")

    def _admit_probe(self) -> None:
        """Refuse a spare connection whose request is no probe, unless there is room by now."""
        self.spares.pop(self, None)
        if len(self.connections) - len(self.spares) <= self.settings.max_connections:
            self._is_spare = False
        elif httptools.parse_url(self.url).path not in _PROBES:
            self._refuse_spare()

    def _look_for_client(self) -> None:
        """Abort if the client has left: only what is sent to it tells that from one that waits.

        An interim response may be sent at any time before the response.
        """
        if self._is_answered or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        is_next = not self.pipeline and not self.cycle.response_started
        if is_next and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self._client_timer = self.loop.call_later(_STILL_THERE_S, self._look_for_client)

    def _watch_writing(self) -> None:
        """Look again later, and give up if the client has read hardly anything by then."""
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

    def _close(self) -> None:
        """Close once everything is sent, or abort if the client does not read it in time."""
        if not self.transport.is_closing():
            self.transport.close()
            self._close_timer = self.loop.call_later(self.settings.write_timeout_s, self.transport.abort)

    def _end_for_headers(self) -> None:
        message = f"the headers have more than {_MAX_HEADER_BYTES} bytes"
        self._end(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message, "Validation")

    def _end(self, status: HTTPStatus, message: str, error_type: str) -> None:
        """Respond to something that is not passed on, and close. What follows is ignored."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(TeiError(message, error_type))
        record = self._record()
        record.status, record.bytes = status.value, len(body)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += "retry-after: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head += f"x-request-id: {record.id}\r\n"
        self.transport.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        self._close()
        self.log.finish(record, is_bulk=status == HTTPStatus.SERVICE_UNAVAILABLE)

    def _record(self) -> Record:
        """The record of what is not passed on, of which the method and the path may be unknown."""
        url: bytes = getattr(self, "url", b"")  # set when a request begins
        method = self.parser.get_method().decode("ascii") if url else "-"
        return new_record((), method, url.partition(b"?")[0].decode("latin-1") or "-")


def connection_class(settings: Settings, log: RequestLog) -> type[Any]:
    """Make the class of a server's connections, which uvicorn instantiates itself."""
    return type("Connection", (Connection,), {"settings": settings, "log": log, "spares": {}})


def _size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
