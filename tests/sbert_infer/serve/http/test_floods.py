"""Clients that send without reading, and more of them than there is room for."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable

import httpx
import pytest

from sbert_infer.serve.http.connection import _PIECE_BYTES, Connection
from tests.sbert_infer.serve.conftest import Running, until
from tests.sbert_infer.serve.http.test_admission import read_answers
from tests.sbert_infer.serve.http.test_limits import connect, read_all

SHORTEST = b"GET / HTTP/1.1\r\n\r\n"
MB = 2**20


def send_all_it_takes(connection: socket.socket, data: bytes) -> int:
    """Send until the other side takes nothing for a second, and return how much it took."""
    connection.setblocking(False)
    sent = 0
    while sent < len(data) and select.select([], [connection], [], 1)[1]:
        sent += connection.send(data[sent : sent + 2**16])
    connection.settimeout(20)
    return sent


def connections_of(server: Running) -> list[Connection]:
    http = server.server._uvicorn
    assert http is not None
    return [found for found in list(http.server_state.connections) if isinstance(found, Connection)]


# Requests -----------------------------------------------------------------------------------------


def test_no_more_is_read_from_a_client_that_does_not_read(server: Running) -> None:
    with connect(server) as connection:
        address = connection.getsockname()
        send_all_it_takes(connection, SHORTEST * (8 * MB // len(SHORTEST)))
        (found,) = [each for each in connections_of(server) if each.client == address]
        assert len(found.pipeline) <= _PIECE_BYTES // len(SHORTEST)
        assert len(found._unparsed) < MB  # what came in one piece
        assert found.flow.read_paused
        assert httpx.get(f"{server.url}/health/live", timeout=30).status_code == 200


def test_the_queue_does_not_grow_while_bodies_are_read(server: Running) -> None:
    """Reading a body resumes the connection, which must not let more requests in."""
    body = b'{"inputs": "a"}'
    ask = b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    with connect(server) as connection:
        address = connection.getsockname()
        connection.setblocking(False)
        most = 0
        for _ in range(50):
            with contextlib.suppress(BlockingIOError):
                connection.send(ask * 5000)
            most = max([most, *(len(each._unparsed) for each in connections_of(server) if each.client == address)])
            assert httpx.get(f"{server.url}/health/live", timeout=30).status_code == 200
    assert most < MB


def test_all_of_many_requests_at_once_are_answered_in_order(server: Running) -> None:
    asked = [b"GET /health/live HTTP/1.1\r\nx-request-id: %d\r\n\r\n" % number for number in range(5000)]
    with connect(server) as connection:
        connection.sendall(b"".join(asked))
        heads = [head for head, _ in read_answers(connection, len(asked))]
        assert [int(head.rpartition(b"x-request-id: ")[2]) for head in heads] == list(range(len(asked)))
        body = json.dumps({"inputs": "a" * 5000}).encode()
        head = b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall((head + body) * 20 + asked[0])  # pieces end anywhere
        answers = read_answers(connection, 21)
        assert {head[:12] for head, _ in answers} == {b"HTTP/1.1 200"}
        assert answers[-1][1] == b'{"status":"live"}'


# Connections --------------------------------------------------------------------------------------


@pytest.fixture
def crowded(start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr("sbert_infer.serve.http.connection._SPARE_S", 3.0)  # the machine may pause for a while
    return start_server(max_connections=3, keys=("secret",))


def ask(server: Running, path: str, headers: str = "") -> bytes:
    """Ask on a connection of its own, until it is closed."""
    with connect(server) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
        return read_all(connection)


def test_probes_are_answered_when_there_is_no_room(crowded: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(crowded))
        until(lambda: crowded.connections() == 3)
        for path in ("/health", "/health/live", "/health/ready"):
            answer = ask(crowded, path)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
        key = "authorization: Bearer secret\r\n"
        assert b"sbert_http_connections 4.0\n" in ask(crowded, "/metrics", key)
        assert ask(crowded, "/metrics").startswith(b"HTTP/1.1 401 ")
        for path in ("/", "/v1/models", "/health/../v1/models", "/health/live2"):
            assert ask(crowded, path, key).startswith(b"HTTP/1.1 503 ")


def test_one_connection_too_many_may_stay_if_another_has_left(crowded: Running) -> None:
    with connect(crowded), connect(crowded), connect(crowded) as third:
        until(lambda: crowded.connections() == 3)
        with connect(crowded) as late:
            third.close()
            until(lambda: crowded.connections() == 3)
            for _ in range(2):
                late.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n\r\n")
                assert read_answers(late, 1)[0][0].startswith(b"HTTP/1.1 200 ")


def test_a_flood_of_silent_connections_does_not_keep_probes_out(crowded: Running) -> None:
    with contextlib.ExitStack() as stack:
        flood = [stack.enter_context(connect(crowded)) for _ in range(200)]
        assert ask(crowded, "/health/live").startswith(b"HTTP/1.1 200 ")
        assert all(read_all(each).startswith(b"HTTP/1.1 503 ") for each in flood[3:])
        assert ask(crowded, "/health/live").startswith(b"HTTP/1.1 200 ")
    until(lambda: crowded.connections() == 0)
    assert crowded.client.get("/v1/models").status_code == 200


def test_every_answer_is_counted_and_logged(crowded: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        with connect(crowded) as connection:
            connection.sendall(b"what is this\r\n\r\n")
            answer = read_all(connection)
        assert b"\r\nx-request-id: " in answer
        with connect(crowded) as connection:
            connection.sendall(b"GET /embed?secret HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 431 ")
        until(lambda: crowded.connections() == 0)
        with connect(crowded), connect(crowded), connect(crowded):
            until(lambda: crowded.connections() == 3)
            assert ask(crowded, "/").startswith(b"HTTP/1.1 503 ")
            until(lambda: "refused 1 connections with 503: see --max-connections" in caplog.messages)
    metrics = crowded.client.get("/metrics").text
    for route, status in (("other", 400), ("/embed", 431), ("/", 503)):
        assert f'sbert_http_requests_total{{route="{route}",status="{status}"}} 1.0' in metrics
    logged = {each.record.status: each.record for each in caplog.records if hasattr(each, "record")}
    assert (logged[431].method, logged[431].path) == ("GET", "/embed")
    assert logged[400].bytes == len(answer.partition(b"\r\n\r\n")[2])
