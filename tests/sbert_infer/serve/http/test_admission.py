"""The admission check: its refusals are still HTTP, are counted and logged, and need a key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from sbert_infer.serve.settings import ModelFile
from sbert_infer.types import BULK, INTERACTIVE, Priority
from tests.sbert_infer.serve.conftest import Running, until
from tests.sbert_infer.serve.http.test_limits import BODY, connect, read_all, send_head


@contextlib.contextmanager
def crowded(server: Running, priorities: Sequence[Priority] = (INTERACTIVE, BULK)) -> Iterator[None]:
    """As if texts that fill the queue were being tokenized."""
    scheduler = server.server.models.first.engine._queue.scheduler
    most = scheduler.limits.max_queue_tokens
    for priority in priorities:
        scheduler.lanes[priority].reserved_tokens += most
    try:
        yield
    finally:
        for priority in priorities:
            scheduler.lanes[priority].reserved_tokens -= most


def read_answers(connection: socket.socket, number: int) -> list[tuple[bytes, bytes]]:
    """Read so many responses: their heads and bodies."""
    data = b""
    answers: list[tuple[bytes, bytes]] = []
    while len(answers) < number:
        head, end, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if end and len(rest) >= length:
            answers.append((head, rest[:length]))
            data = rest[length:]
        else:
            chunk = connection.recv(2**16)
            assert chunk, f"closed after {data!r}"
            data += chunk
    assert data == b""
    return answers


def test_both_dialects_and_the_way_back(server: Running) -> None:
    with crowded(server):
        openai = server.post("/v1/embeddings", {"input": "a cat"}, headers={"x-request-id": "mine-1"})
        tei = server.post("/embed", {"inputs": "a cat"})
    assert openai.status_code == tei.status_code == 429
    assert openai.json()["error"]["type"] == "rate_limit_error"
    assert "the queue is full" in openai.json()["error"]["message"]
    assert tei.json()["error_type"] == "Overloaded"
    assert openai.headers["x-request-id"] == "mine-1"
    assert tei.headers["x-request-id"]
    for answer in (openai, tei):
        assert answer.headers["content-type"] == "application/json"
        assert "date" in answer.headers
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1
    assert server.post("/embed", {"inputs": "a cat"}).status_code == 200  # on the same connection


def test_a_full_lane_refuses_only_what_belongs_there(server: Running) -> None:
    """Without a header, that is known once the body is read."""
    query, bulk = {"inputs": "a cat"}, {"inputs": [f"a cat {number}" for number in range(200)]}
    headers: list[dict[str, str]] = [{}, {"x-priority": "interactive"}, {"x-priority": "bulk"}]

    def statuses(body: Mapping[str, object]) -> list[int]:
        return [server.post("/embed", body, headers=header).status_code for header in headers]

    with crowded(server, [INTERACTIVE]):
        assert (statuses(query), statuses(bulk)) == ([429, 429, 200], [200, 429, 200])
    with crowded(server, [BULK]):
        assert (statuses(query), statuses(bulk)) == ([200, 200, 429], [429, 200, 429])


def test_refusals_are_counted(server: Running) -> None:
    def counted() -> list[float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        names = ('sbert_http_requests_total{route="/embed",status="429"}', 'sbert_errors_total{kind="overloaded"')
        return [sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names]

    before = counted()
    with crowded(server):
        for _ in range(3):
            assert server.post("/embed", {"inputs": "a cat"}).status_code == 429
    assert counted() == [count + 3 for count in before]


def test_a_refusal_counts_for_the_model_that_was_asked(start_server: Callable[..., Running], served_onnx: Path) -> None:
    server = start_server(models=(ModelFile(served_onnx, "first"), ModelFile(served_onnx, "second")))
    schedulers = [model.engine._queue.scheduler for model in server.server.models]
    for scheduler in schedulers:
        scheduler.lanes["interactive"].reserved_tokens += scheduler.limits.max_queue_tokens
    assert server.post("/v1/embeddings", {"input": "a cat", "model": "second"}).status_code == 429
    assert server.post("/embed", {"inputs": ["a cat"] * 3, "model": "second"}).status_code == 429
    metrics = server.client.get("/metrics").text
    assert 'sbert_errors_total{kind="overloaded",model="first"} 0.0' in metrics
    assert 'sbert_errors_total{kind="overloaded",model="second"} 2.0' in metrics


def test_refusals_are_logged_in_one_line_a_second(
    start_server: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    server = start_server()
    with caplog.at_level("INFO"), crowded(server):
        for _ in range(3):
            assert server.post("/embed", {"inputs": "a cat"}).status_code == 429
        until(lambda: any(line.startswith("refused") for line in caplog.messages))
    lines = [line for line in caplog.messages if line.startswith("refused")]
    assert lines[0].endswith("requests with 429: the server is overloaded")
    assert [record for record in caplog.records if hasattr(record, "record") and record.record.status == 429] == []


def test_the_queue_is_revealed_only_with_a_key(start_server: Callable[..., Running]) -> None:
    server = start_server(keys=("secret",))
    with crowded(server):
        stranger = httpx.post(f"{server.url}/embed", json={"inputs": "a cat"})
        wrong = httpx.post(f"{server.url}/embed", json={"inputs": "a"}, headers={"authorization": "Bearer secret2"})
        assert [stranger.status_code, wrong.status_code] == [401, 401]
        assert server.post("/embed", {"inputs": "a cat"}).status_code == 429


def test_a_page_of_another_origin_can_read_its_refusal(start_server: Callable[..., Running]) -> None:
    server = start_server(cors_origins=("https://page.example",))
    with crowded(server):
        answer = server.post("/embed", {"inputs": "a cat"}, headers={"origin": "https://page.example"})
    assert answer.status_code == 429
    assert answer.headers["access-control-allow-origin"] == "https://page.example"


def test_pipelined_requests_get_their_responses_in_order(server: Running) -> None:
    names = ("first", "second", "third")
    with crowded(server), connect(server) as connection:
        for name in names:
            send_head(connection, len(BODY), extra=f"x-request-id: {name}\r\n")
            connection.sendall(BODY)
        answers = read_answers(connection, 3)
    for name, (head, body) in zip(names, answers, strict=True):
        assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert f"x-request-id: {name}".encode() in head
        assert json.loads(body)["error_type"] == "Overloaded"


def ask(text: str, key: str = "secret") -> bytes:
    body = json.dumps({"inputs": text}).encode()
    head = f"POST /embed HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def test_repeated_requests_on_one_connection(start_server: Callable[..., Running]) -> None:
    """Each request is refused while the queue is full, and served as soon as it is not."""
    server = start_server(keys=("secret",))
    texts = ("a", "a cat", "a cat sat on a mat " * 5, "")
    with connect(server) as connection:
        with crowded(server):
            heads = []
            for text in texts:
                connection.sendall(ask(text))
                ((head, body),) = read_answers(connection, 1)
                assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
                assert json.loads(body)["error_type"] == "Overloaded"
                heads.append(head)
            assert len({head.partition(b"x-request-id: ")[2] for head in heads}) == len(texts)
            connection.sendall(ask("a cat") + ask("two at once"))
            assert [head[9:12] for head, _ in read_answers(connection, 2)] == [b"429", b"429"]
            whole = ask("a cat in pieces")
            connection.sendall(whole[:-5])
            time.sleep(0.05)
            connection.sendall(whole[-5:])
            assert [head[9:12] for head, _ in read_answers(connection, 1)] == [b"429"]
            connection.sendall(ask("a cat", key="wrong"))
            assert [head[9:12] for head, _ in read_answers(connection, 1)] == [b"401"]
            connection.sendall(ask("a cat"))
            assert [head[9:12] for head, _ in read_answers(connection, 1)] == [b"429"]
        connection.sendall(ask("a cat"))
        ((head, body),) = read_answers(connection, 1)
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body) == server.post("/embed", {"inputs": "a cat"}).json()
    metrics = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer secret"}).text
    assert 'sbert_http_requests_total{route="/embed",status="429"} 8.0' in metrics


def test_a_body_that_looks_like_a_request_is_none(start_server: Callable[..., Running]) -> None:
    server = start_server(keys=("secret",))
    with crowded(server), connect(server) as connection:
        connection.sendall(ask("a cat"))
        read_answers(connection, 1)
        body = ask("a cat")
        connection.sendall(ask("").partition(b"content-length")[0] + b"content-length: %d\r\n\r\n" % len(body))
        time.sleep(0.05)
        connection.sendall(body)
        read_answers(connection, 1)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)  # no second response
        connection.settimeout(20)
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert read_answers(connection, 1)[0][0].startswith(b"HTTP/1.1 200")


def test_an_empty_line_between_requests(start_server: Callable[..., Running]) -> None:
    server = start_server(read_timeout_s=0.5)
    with crowded(server), connect(server) as connection:
        connection.sendall(ask("a cat"))
        read_answers(connection, 1)
        connection.sendall(b"\r\n")
        for _ in range(10):  # for longer than headers may take
            time.sleep(0.1)
            connection.sendall(ask("a cat"))
            assert read_answers(connection, 1)[0][0].startswith(b"HTTP/1.1 429")


def test_a_connection_that_is_refused_repeatedly_is_not_idle(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    http = server.server._uvicorn
    assert http is not None
    monkeypatch.setattr(http.config, "timeout_keep_alive", 1)
    with crowded(server), connect(server) as connection:
        for number in range(12):  # for longer than a connection may be idle
            connection.sendall(ask(f"text {number}"))
            assert read_answers(connection, 1)[0][0].startswith(b"HTTP/1.1 429")
            time.sleep(0.15)
        assert read_all(connection) == b""  # but now it is


def test_a_body_that_comes_late_or_never(start_server: Callable[..., Running]) -> None:
    server = start_server(read_timeout_s=0.5)
    with crowded(server), connect(server) as late, connect(server) as never:
        send_head(late, len(BODY))
        send_head(never, len(BODY))
        time.sleep(0.1)
        late.sendall(BODY)
        assert read_answers(late, 1)[0][0].startswith(b"HTTP/1.1 429")
        answer = read_all(never)
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"connection: close" in answer
        time.sleep(0.6)  # an idle connection may stay
        send_head(late, len(BODY))
        late.sendall(BODY)
        assert read_answers(late, 1)[0][0].startswith(b"HTTP/1.1 429")


def test_clients_that_leave_are_counted_as_such(start_server: Callable[..., Running]) -> None:
    server = start_server()
    with crowded(server):
        with connect(server) as connection:
            send_head(connection, len(BODY))
            time.sleep(0.1)
        until(lambda: 'status="499"' in httpx.get(f"{server.url}/metrics").text)
    assert 'status="429"' not in httpx.get(f"{server.url}/metrics").text


def test_a_response_during_shutdown(start_server: Callable[..., Running]) -> None:
    server = start_server()
    with crowded(server), connect(server) as connection:
        send_head(connection, len(BODY))
        time.sleep(0.1)
        server.server.stop_soon()
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 429")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    ("content", "headers"),
    [(b" " * 200_000, {}), (b"no gzip", {"content-encoding": "gzip"}), (iter([b"no ", b"JSON"]), {})],
    ids=["large", "compressed", "chunked"],
)
def test_what_is_not_ordinary_is_not_read_either(server: Running, content: bytes, headers: dict[str, str]) -> None:
    with crowded(server):
        answer = server.client.post("/embed", content=content, headers={"content-type": "application/json", **headers})
    assert answer.status_code == 429
    assert "the queue is full" in answer.json()["error"]


def test_a_refusal_does_not_end_what_comes_behind_it(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests in one piece: the second takes longer than a connection may be idle."""
    server = start_server(keys=("secret",), admin_keys=("admin",))
    http = server.server._uvicorn
    assert http is not None
    monkeypatch.setattr(http.config, "timeout_keep_alive", 1)

    async def slow(*_: object) -> None:
        await asyncio.sleep(2)

    monkeypatch.setattr(server.server.models, "reload", slow)
    head = "HTTP/1.1\r\nhost: x\r\nauthorization: Bearer"
    first = f"POST /embed {head} secret\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY.decode()}"
    second = f"POST /admin/reload {head} admin\r\ncontent-length: 0\r\n\r\n"
    with crowded(server), connect(server) as connection:
        connection.sendall((first + second).encode())
        answers = read_answers(connection, 2)
    assert answers[0][0].startswith(b"HTTP/1.1 429")
    assert answers[1][0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "extra", ["connection: close\r\n", "expect: 100-continue\r\nconnection: close\r\n"], ids=["close", "expect"]
)
def test_other_ways_to_ask(server: Running, extra: str) -> None:
    with crowded(server), connect(server) as connection:
        send_head(connection, len(BODY), extra=extra)
        connection.sendall(BODY)
        answer = read_all(connection)
    assert b"HTTP/1.1 429" in answer  # after "100 Continue", perhaps
    assert b"connection: close" in answer
