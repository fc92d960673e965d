"""Requests whose head is known: it was parsed before, and only the length of the body differs."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SameHead"]

_LENGTH = b"\r\ncontent-length:"
_END = b"\r\n\r\n"
_VARIES = b"\r\nx-request-id:"  # has to be in the answer
# Larger ones are not worth being kept, or left to those who look at bodies.
_MAX_HEAD_BYTES = 4096
_MAX_DIGITS = 5


class SameHead(NamedTuple):
    """The head of a request, without the digits of its length."""

    start: bytes
    rest: bytes

    @classmethod
    def of(cls, request: bytes) -> SameHead | None:
        """The head of a request that the parser has taken, if all of it came at once and nothing else did."""
        end = request.find(_END) + len(_END)
        head = request[:end].lower()
        if not len(_END) <= end <= _MAX_HEAD_BYTES or head.count(_LENGTH) != 1 or _VARIES in head:
            return None
        start = head.index(_LENGTH) + len(_LENGTH)
        while head[start : start + 1] == b" ":
            start += 1
        found = cls(request[:start], request[head.index(b"\r", start) : end])
        return found if found.begins(request) else None

    def begins(self, request: bytes) -> bool:
        """Whether this is such a request, from the first byte to the last."""
        if not request.startswith(self.start):
            return False
        stop = request.find(b"\r", len(self.start))
        digits = request[len(self.start) : stop]
        if not digits.isdigit() or len(digits) > _MAX_DIGITS or not request.startswith(self.rest, stop):
            return False
        return int(digits) == len(request) - stop - len(self.rest)
