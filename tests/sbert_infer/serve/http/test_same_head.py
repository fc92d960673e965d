"""Requests that are known by their head: never one that the parser would read in another way."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.serve.http.same_head import SameHead

HEAD = "POST /embed HTTP/1.1\r\nhost: a\r\nContent-Length: {}\r\nauthorization: Bearer k\r\n\r\n"


def request(body: bytes, head: str = HEAD) -> bytes:
    return head.replace("{}", str(len(body))).encode() + body


class Parsed:
    """What the parser makes of bytes: whole requests, and whether something is left."""

    def __init__(self, data: bytes) -> None:
        self.url, self.body, self.requests = b"", b"", 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.headers, self.body = b"", [], b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.requests += 1

    @property
    def head(self) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        return self.url, [header for header in self.headers if header[0] != b"content-length"]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_another_body_is_the_same_head(first: bytes, second: bytes) -> None:
    known = SameHead.of(request(first))
    assert known is not None
    assert known.begins(request(second))
    assert not known.begins(request(second) + b"P")
    assert not known.begins(request(second)[:-1])


@given(
    st.binary(max_size=40),
    st.integers(0, 130),
    st.integers(0, 3),
    st.one_of(
        st.binary(max_size=4), st.sampled_from([b"\r\n", b"\r\ncontent-length: 1", b"1", b"0", b" ", b"+", b"-"])
    ),
)
def test_what_is_known_is_what_the_parser_would_read(body: bytes, place: int, removed: int, added: bytes) -> None:
    """Whatever is changed about a request: it is not known, or it is one request with the same head."""
    known = SameHead.of(request(b"some body"))
    assert known is not None
    whole = request(body)
    changed = whole[:place] + added + whole[place + removed :]
    if known.begins(changed):
        parsed = Parsed(changed)
        assert parsed.requests == 1
        assert parsed.head == Parsed(whole).head
        assert changed.endswith(parsed.body)
        assert int(dict(parsed.headers)[b"content-length"]) == len(parsed.body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n\r\n",
        request(b"", "GET / HTTP/1.1\r\nhost: a\r\n\r\n"),
        request(b"ab", HEAD.replace("host: a", "content-length: {}")),
        request(b"ab", HEAD.replace("host: a", "x-request-id: mine")),
        request(b"ab", HEAD.replace("Content-Length: {}", "Content-Length:\r\n {}")),
        request(b"ab") + b"c",
        request(b"ab")[:-1],
        request(b"ab") + request(b"ab"),
    ],
)
def test_what_is_no_such_request(data: bytes) -> None:
    assert SameHead.of(data) is None
