"""What stands between a connection and its transport: when to read, and what to write at once."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_COPIED_BYTES = 64 * 2**10  # to save a system call


class Flow(FlowControl):
    """Flow control that does not resume reading while it is held."""

    _is_held = False

    def hold(self, wanted: bool) -> None:
        """Read no more, or go on reading."""
        before, self._is_held = self._is_held, wanted
        if wanted:
            self.pause_reading()
        elif before:
            self.resume_reading()

    def resume_reading(self) -> None:
        """Go on reading, unless held."""
        if not self._is_held:
            super().resume_reading()


class HeadWithBody:
    """The transport as uvicorn's response sees it: the head waits for the beginning of the body.

    Two writes would be two system calls, each of which wakes the client. What is written after the
    end is dropped: uvicorn tells only the last of several requests that their client has left.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport, has_body: bool = True) -> None:
        self._transport = transport
        self._head: bytes | None = b"" if has_body else None  # empty before it is written, None once it is sent

    def write(self, data: bytes) -> None:
        """Send a piece of the response, or keep it if it is the head."""
        if self._transport.is_closing():
            return
        if self._head == b"" and data != CONTINUE:
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
        """Send a head without a body, and close."""
        if self._head:
            self._transport.write(self._head)
            self._head = None
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._transport.is_closing()
