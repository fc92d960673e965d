"""How the bytes of a response are sent."""

from __future__ import annotations

import json
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sbert_infer.serve.http import connection
from sbert_infer.serve.http.transport import HeadWithBody
from tests.sbert_infer.serve.conftest import Running
from tests.sbert_infer.serve.http.test_admission import read_answers

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.fixture
def wire() -> Any:
    return Wire()


def test_head_and_body_are_one_write(wire: Any) -> None:
    answer = HeadWithBody(wire)
    answer.write(HEAD)
    answer.write(b"body")
    assert wire.writes == [HEAD + b"body"]
    answer.write(b"more of it")  # of a body that comes in pieces
    assert wire.writes[1:] == [b"more of it"]


def test_the_server_responds_in_one_write(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(HeadWithBody):
        def __init__(self, transport: Any, has_body: bool = True) -> None:
            writes: list[bytes] = []
            answers.append(writes)

            def write(data: bytes) -> None:
                writes.append(data)
                transport.write(data)

            super().__init__(SimpleNamespace(write=write, is_closing=transport.is_closing))  # type: ignore[arg-type]

    answers: list[list[bytes]] = []
    monkeypatch.setattr(connection, "HeadWithBody", Watched)
    body = server.post("/embed", {"inputs": ["a text"]}).content
    assert len(answers) == 1
    assert [written.partition(b"\r\n\r\n")[2] for written in answers[0]] == [body]


def test_an_empty_body_sends_the_head(wire: Any) -> None:
    answer = HeadWithBody(wire)
    answer.write(HEAD)
    answer.write(b"")
    assert wire.writes == [HEAD]


def test_a_large_body_is_not_copied(wire: Any) -> None:
    large = b"x" * 2**20
    answer = HeadWithBody(wire)
    answer.write(HEAD)
    answer.write(large)
    assert wire.writes == [HEAD, large]


def test_a_client_that_waits_for_its_turn_gets_it_at_once(wire: Any) -> None:
    answer = HeadWithBody(wire)
    answer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert len(wire.writes) == 1
    answer.write(HEAD)
    answer.write(b"body")
    assert wire.writes[1:] == [HEAD + b"body"]


def test_a_head_without_a_body_is_sent_before_the_end(wire: Any) -> None:
    answer = HeadWithBody(wire)
    answer.write(HEAD)
    answer.close()
    assert wire.writes == [HEAD]
    assert wire.closed
    assert answer.is_closing()


def test_head_expect_and_get_on_one_connection(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n")
        head = connection.recv(2**16)
        assert head.startswith(b"HTTP/1.1 ")
        assert head.endswith(b"\r\n\r\n")
        body = b'{"inputs": "a cat"}'
        ask = b"POST /embed HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        connection.sendall(ask + b"expect: 100-continue\r\n\r\n")
        assert connection.recv(2**16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        ((answer, vectors),) = read_answers(connection, 1)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert vectors.startswith(b"[[")
        wish = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
        upgrade = ask + wish + b"\r\n" + body  # as Java's clients begin
        connection.sendall(upgrade[:-5])
        time.sleep(0.05)
        connection.sendall(upgrade[-5:] + upgrade)
        assert [found for _, found in read_answers(connection, 2)] == [vectors] * 2
        connection.sendall((ask + b"\r\n" + body) * 3)  # pipelined
        assert [found for _, found in read_answers(connection, 3)] == [vectors] * 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (b"what is this\r\n\r\n", "this is not HTTP"),
        *(
            (b"CONNECT %s HTTP/1.1\r\nhost: x\r\n\r\n" % what, "this server is no proxy")
            for what in (b"example.org:443", b"/x", b"*", b"//a/b", b"http://a/")
        ),
    ],
)
def test_what_is_no_request_is_said_as_everything_is(server: Running, request_: bytes, message: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request_)
        ((head, body),) = read_answers(connection, 1)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body) == {"error": message, "error_type": "Validation"}
        assert connection.recv(1) == b""


def test_thousands_of_upgrades_in_one_piece(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    ask = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(ask * 3000)
        answers = read_answers(connection, 3000)
    assert {body for _, body in answers} == {b'{"status":"live"}'}
