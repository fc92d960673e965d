"""Clients that send too much, too slowly, or never read are bounded, and told so if possible."""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import socket
import time
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.sbert_infer.serve.conftest import Running, until

JSON = {"content-type": "application/json"}
MB = 2**20
BODY = json.dumps({"inputs": "A cat sat."}).encode()


def connect(server: Running) -> socket.socket:
    url = httpx.URL(server.url)
    assert url.port is not None
    return socket.create_connection((url.host, url.port), timeout=20)


def send_head(connection: socket.socket, length: int, path: str = "/embed", extra: str = "") -> None:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{extra}\r\n"
    )
    connection.sendall(head.encode())


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(2**16):
            data += chunk
    return data


# Size ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_bodies(start_server: Callable[..., Running]) -> Running:
    return start_server(max_body_bytes=100_000)


def chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 10_000):
        yield b" " * 10_000


@pytest.mark.parametrize("content", [b" " * 100_001, chunks(110_000)], ids=["length", "chunked"])
def test_a_large_body_is_refused(small_bodies: Running, content: bytes) -> None:
    response = small_bodies.client.post("/embed", content=content, headers=JSON)
    assert response.status_code == 413
    assert "more than 100000 bytes" in response.json()["error"]
    assert small_bodies.client.post("/embed", content=BODY.ljust(100_000), headers=JSON).status_code == 200


def test_an_endless_body_is_cut_off(small_bodies: Running) -> None:
    with connect(small_bodies) as connection:
        send_head(connection, 10**12)
        with contextlib.suppress(ConnectionError):
            for _ in range(10_000):
                connection.sendall(b" " * 65_536)
            pytest.fail("the server reads on")
    assert small_bodies.client.post("/embed", content=BODY, headers=JSON).status_code == 200


def test_a_client_that_asks_first_need_not_send(small_bodies: Running) -> None:
    with connect(small_bodies) as connection:
        send_head(connection, 10**9, extra="expect: 100-continue\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")


def test_gzip(small_bodies: Running) -> None:
    packed = {**JSON, "content-encoding": "gzip"}
    for content in (gzip.compress(BODY), gzip.compress(BODY[:10]) + gzip.compress(BODY[10:])):
        assert small_bodies.client.post("/embed", content=content, headers=packed).status_code == 200
    for content, message in (
        (gzip.compress(BODY)[:-9], "ends too early"),
        (b"no gzip", "not gzip"),
        (b"", "ends too early"),
        (zlib.compress(BODY), "not gzip"),
    ):
        response = small_bodies.client.post("/embed", content=content, headers=packed)
        assert response.status_code == 400
        assert message in response.json()["error"]


def test_a_gzip_bomb_takes_no_memory(small_bodies: Running) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * 2**20) for _ in range(90)) + packer.flush()
    assert len(bomb) < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    response = small_bodies.client.post("/embed", content=bomb, headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 413
    assert "after decompression" in response.json()["error"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB, of the bomb's 94 MB


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "Application/JSON"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "text/plain", "authorization": "Bearer key"}, 415),
        ({"authorization": "Bearer key"}, 200),  # which a page of another site can't send without asking
        ({"api-key": "key"}, 200),
        ({"authorization": "Basic OmtleQ=="}, 415),
        ({"content-type": "application/jsonlines"}, 415),
        ({**JSON, "content-encoding": "identity"}, 200),
        ({**JSON, "content-encoding": "br"}, 415),
        ({**JSON, "content-encoding": "gzip, gzip"}, 415),
    ],
)
def test_content_types(server: Running, headers: dict[str, str], status: int) -> None:
    response = server.client.post("/embed", content=BODY, headers=headers)
    assert response.status_code == status, response.text


def test_long_headers_are_refused(server: Running) -> None:
    for head in (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"GET / HTTP/1.1\r\na: ", b"GET /"):
        with connect(server) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(head)
            for _ in range(10_000):
                connection.sendall(b"x" * 65_536)
            pytest.fail("the server reads on")


@pytest.mark.parametrize("lines", [b"a: %s\r\n" % (b"x" * 70_000), b"a: b\r\n" * 12_000])
@pytest.mark.parametrize("first", [10**6, 40_000, -10], ids=["at once", "in halves", "the end later"])
@pytest.mark.parametrize("start", ["GET /health/live", "CONNECT a:80"])
def test_long_headers_that_end_are_refused(server: Running, start: str, first: int, lines: bytes) -> None:
    head = f"{start} HTTP/1.1\r\nhost: a\r\n".encode() + lines + b"\r\n"
    with connect(server) as connection:
        connection.sendall(head[:first])
        time.sleep(0.05)
        connection.sendall(head[first:])
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_large_body_in_the_same_piece_is_no_header(server: Running) -> None:
    body = BODY.ljust(100_000)
    with connect(server) as connection:
        head = b"POST /embed HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


# Time ---------------------------------------------------------------------------------------------


def test_slow_senders_are_not_waited_for(start_server: Callable[..., Running]) -> None:
    server = start_server(read_timeout_s=0.3)
    with connect(server) as silent, connect(server) as partial, connect(server) as body, connect(server) as trickle:
        partial.sendall(b"POST /embed HTTP/1.1\r\nhost:")
        send_head(body, len(BODY))
        send_head(trickle, 10_000)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                trickle.sendall(b" ")
                time.sleep(0.02)
        with connect(server) as odd:  # bytes that begin no request, once one was answered
            odd.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert odd.recv(2**16).startswith(b"HTTP/1.1 200")
            odd.sendall(b"\r\n")
            assert read_all(odd) == b""
        assert read_all(silent) == b""
        assert read_all(partial) == b""
        assert read_all(body).startswith(b"HTTP/1.1 408")
        assert read_all(trickle).startswith(b"HTTP/1.1 408")
    response = server.post("/embed", {"inputs": "A cat sat."})
    assert response.status_code == 200
    time.sleep(0.5)  # idle connections may stay
    assert server.post("/embed", {"inputs": "A cat sat."}).status_code == 200


def test_a_response_that_is_never_read_is_given_up(start_server: Callable[..., Running]) -> None:
    server = start_server(write_timeout_s=0.3)
    body = json.dumps({"inputs": [f"text {number}" for number in range(2048)]}).encode()
    connections = server.connections
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):  # more than the kernel buffers
            send_head(connection, len(body))
            connection.sendall(body)
        until(lambda: connections() == 0)
    assert server.client.get("/health/live").status_code == 200


def test_the_oldest_response_that_is_not_read_makes_room(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbert_infer.serve.http.body_memory._UNREAD_BYTES", MB)
    server = start_server()
    body = json.dumps({"inputs": ["a"] * 2048}).encode()  # some 700 kB of vectors
    with connect(server) as first, connect(server) as second:
        for connection in (first, second):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(ConnectionError):
                for _ in range(20):  # more than the kernel buffers
                    send_head(connection, len(body))
                    connection.sendall(body)
        until(lambda: server.connections() == 1)
        assert len(server.post("/embed", {"inputs": ["a"] * 2048}).json()) == 2048


def test_vectors_of_all_requests_are_bounded(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbert_infer.serve.http.body_memory._LEAST_BYTES", 200_000)
    server = start_server(max_body_bytes=20_000)
    refused = server.post("/embed", {"inputs": ["a"] * 2048})  # 8 kB, which give 256
    assert refused.status_code == 429
    assert "too many large requests" in refused.json()["error"]
    assert server.post("/embed", {"inputs": ["a"] * 1024}).status_code == 200
    assert server.post("/embed", {"inputs": ["a"] * 1024}).status_code == 200


def test_too_many_connections(start_server: Callable[..., Running]) -> None:
    server = start_server(max_connections=3)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(server)) for _ in range(3)]
        with connect(server) as refused:
            answer = read_all(refused)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too many connections" in answer
        assert b"retry-after: 1" in answer
        held[0].close()
        until(lambda: server.connections() <= 2)
        assert httpx.get(f"{server.url}/health").status_code == 200
