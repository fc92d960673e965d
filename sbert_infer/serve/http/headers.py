"""Looking a header up, as a server gives them: names in lower case, in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["first_header"]


def first_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The value of the first one of this name, or nothing."""
    for found, value in headers:
        if found == name:
            return value
    return b""
