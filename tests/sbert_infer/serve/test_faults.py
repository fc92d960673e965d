"""What clients are told when a model fails or is overloaded. A double stands in for the model."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.base import Batch
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from tests.doubles.backend import FakeBackend, Gate, Vectors
from tests.sbert_infer.serve.conftest import Running, until

BAD = "a bad text"


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """Doubles of the backend, in the order they were opened. The first serves until it breaks."""
    made: list[FakeBackend] = []

    def open_fake(*_: object) -> FakeBackend:
        made.append(FakeBackend())
        return made[-1]

    monkeypatch.setattr("sbert_infer.opening.open_backend", open_fake)
    return made


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def faulty(server: Running, text: str, do: Callable[[Vectors, Any], object]) -> Callable[[Vectors], None]:
    """A fault for batches that hold `text`."""
    pipeline = server.server.models.first.engine.engine.pipeline
    tokenized = pipeline.tokenizer([text])
    ((culprit,), _) = pipeline.run_all(tokenized, (SENTENCE,), backend=FakeBackend())

    def fault(vectors: Vectors) -> None:
        found = (vectors == culprit).all(axis=1)
        if found.any():
            do(vectors, found)

    return fault


def hold_workers(server: Running, gate: Gate, threads: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Requests that keep both workers of the double busy until the gate opens."""
    held = []
    for number in range(2):
        held.append(threads.submit(server.post, "/embed", {"inputs": f"held {number}"}))
        assert gate.entered.acquire(timeout=20)
    return held


# Bad texts ----------------------------------------------------------------------------------------


def spoil(vectors: Vectors, found: Any) -> None:
    vectors[found, 3] = np.nan


def refuse(vectors: Vectors, found: Any) -> None:
    raise ValueError("failed in /build/some/path.cc with a bad text")


@pytest.mark.parametrize(("do", "message"), [(spoil, "gives NaN or infinity for"), (refuse, "fails on")])
def test_a_bad_text_is_named_and_affects_no_other_request(
    start_server: Callable[..., Running], fakes: list[FakeBackend], do: Callable[[Vectors, Any], object], message: str
) -> None:
    server = start_server()
    fakes[0].fault = faulty(server, BAD, do)
    with ThreadPoolExecutor(8) as threads:
        bad = threads.submit(server.post, "/v1/embeddings", {"input": ["fine", BAD]})
        tei = threads.submit(server.post, "/embed", {"inputs": ["fine", "as well", BAD]})
        fine = [threads.submit(server.post, "/embed", {"inputs": f"text {number}"}) for number in range(40)]
        assert {answer.result().status_code for answer in fine} == {200}
    assert bad.result().status_code == 400
    assert bad.result().json()["error"]["message"] == f"the model {message} input 1: leave it out"
    assert tei.result().status_code == 424
    assert tei.result().json() == {"error": f"the model {message} input 2: leave it out", "error_type": "Backend"}
    assert server.client.get("/health/ready").status_code == 200


def test_every_kind_of_batch_has_run_before_the_server_is_ready(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[tuple[int, int], bool]] = []

    class Watched(FakeBackend):
        max_batch_tokens = 1024

        def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Vectors]:
            shapes.append((batch.shape, alone))
            return super().run(batch, outputs, alone=alone)

    monkeypatch.setattr("sbert_infer.opening.open_backend", lambda *_: Watched())
    server = start_server()
    longest = server.server.models.first.manifest.max_length
    lengths = dict.fromkeys(min(length, longest) for length in (8, 32, 128, 512))
    assert len(lengths) > 1
    for length in lengths:
        assert ((1, length), True) in shapes
        assert shapes.count(((1024 // length, length), False)) == Watched.workers
    metrics = server.client.get("/metrics").text
    assert 'sbert_texts_total{model="small"} 0.0' in metrics  # none of it counts
    assert "sbert_speed_tokens_per_second{" not in metrics


def test_the_session_for_lone_texts_is_open_when_the_server_is_ready(start_server: Callable[..., Running]) -> None:
    backend = start_server().server.models.first.engine.engine.pipeline.backend
    assert isinstance(backend, OnnxBackend)
    assert (backend._lone_session is not None) == backend._share_cores


def test_a_worker_that_dies_is_replaced(
    start_server: Callable[..., Running], fakes: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()

    def die(vectors: Vectors, found: Any) -> None:
        monkeypatch.setattr("sbert_infer.opening.open_backend", broken)
        raise SystemExit

    def broken(*_: object) -> FakeBackend:
        raise RuntimeError("no memory at /secret/path")

    fakes[0].fault = faulty(server, BAD, die)
    lost = server.post("/v1/embeddings", {"input": BAD})
    assert lost.status_code == 503
    assert lost.json()["error"]["code"] == "model_unavailable"
    assert lost.json()["error"]["type"] == "server_error"
    assert int(lost.headers["retry-after"]) >= 1
    assert "secret" not in lost.text
    until(lambda: server.client.get("/health/ready").status_code == 503)
    assert server.client.get("/health").json()["error_type"] == "Unhealthy"
    assert server.client.get("/health/live").status_code == 200
    monkeypatch.setattr("sbert_infer.opening.open_backend", lambda *_: FakeBackend())
    until(lambda: server.client.get("/health/ready").status_code == 200)
    assert server.post("/embed", {"inputs": "fine"}).status_code == 200
    assert 'sbert_worker_restarts_total{model="small"} 1.0' in server.client.get("/metrics").text


def test_an_unexpected_error_tells_only_its_id(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, secret = start_server(), "a text of " + "somebody"

    def broken(*_: object) -> None:
        raise KeyError(secret)

    monkeypatch.setattr(server.server.models, "get", broken)
    response = server.post("/v1/embeddings", {"input": "a"}, headers={"x-request-id": "mine-1"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "unexpected error; the server's log has it under mine-1"
    assert response.headers["x-request-id"] == "mine-1"
    (logged,) = [record.getMessage() for record in caplog.records if "unexpected" in record.getMessage()]
    assert "mine-1" in logged
    assert "KeyError" in logged
    assert "in broken" in logged
    assert secret not in logged


# Too much work ------------------------------------------------------------------------------------


def test_overload_is_refused_at_once(
    start_server: Callable[..., Running], fakes: list[FakeBackend], gate: Gate
) -> None:
    server = start_server(max_queue_tokens=200)
    fakes[0].fault = gate
    many = [f"{number}" for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        under_way = hold_workers(server, gate, threads)
        under_way.append(threads.submit(server.post, "/embed", {"inputs": many}))
        until(lambda: server.server.models.first.engine.stats().queued_texts == len(many))
        for path, field in (("/v1/embeddings", "input"), ("/embed", "inputs")):
            response = server.post(path, {field: many})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert float(response.headers["retry-after-ms"]) >= 50
        assert response.json()["error_type"] == "Overloaded"
        never = server.post("/v1/embeddings", {"input": [f"{number}" for number in range(500)]})
        assert never.status_code == 413
        assert "max_queue_tokens=200: send fewer" in never.json()["error"]["message"]
        gate.opened.set()
        assert [answer.result().status_code for answer in under_way] == [200] * 3


def test_with_a_full_queue_a_request_is_not_even_read(
    start_server: Callable[..., Running], fakes: list[FakeBackend], gate: Gate
) -> None:
    server = start_server()
    fakes[0].fault = gate
    with ThreadPoolExecutor(4) as threads:
        under_way = hold_workers(server, gate, threads)
        under_way.append(threads.submit(server.post, "/embed", {"inputs": ["a cat", "a dog"]}))
        engine = server.server.models.first.engine
        until(lambda: engine.stats().queued_texts == 2)
        engine._queue.scheduler.limits = replace(
            engine._queue.scheduler.limits, max_queue_tokens=engine.stats().queued_tokens
        )
        for path in ("/v1/embeddings", "/embed", "/"):
            headers = {"content-type": "application/json", "x-priority": "interactive"}
            response = server.client.post(path, content=b"not even JSON", headers=headers)
            assert response.status_code == 429, path
            assert "retry-after-ms" in response.headers
        assert server.post("/tokenize", {"inputs": "a cat"}).status_code == 200  # needs no queue
        assert server.client.get("/health/ready").status_code == 200
        gate.opened.set()
        assert [answer.result().status_code for answer in under_way] == [200] * 3
    assert server.post("/embed", {"inputs": "a cat"}).status_code == 200


def test_a_deadline(start_server: Callable[..., Running], fakes: list[FakeBackend], gate: Gate) -> None:
    server = start_server(timeout_s=5.0)
    fakes[0].fault = gate
    server.server.models.first.engine.timeout_s = 0.2
    response = server.post("/v1/embeddings", {"input": "slow"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "timeout"
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_what_can_never_be_done_in_time_is_told_so(
    start_server: Callable[..., Running], fakes: list[FakeBackend], gate: Gate, path: str
) -> None:
    server = start_server()
    engine = server.server.models.first.engine
    scheduler = engine._queue.scheduler
    fakes[0].fault = gate
    body = {"input" if path == "/v1/embeddings" else "inputs": [f"{number}" for number in range(200)]}

    def refusal() -> str:
        scheduler._done_tokens, scheduler._done_s = 100.0, 1.0  # as if measured
        response = server.post(path, body)
        assert response.status_code == 413
        assert "retry-after" not in response.headers
        return response.text

    engine.timeout_s = 0.5
    assert "send at most 30 at once" in refusal()  # accepted, since nothing waits, and then not done
    scheduler.lanes["bulk"].reserved_tokens += 10_000
    assert "at once, or raise the timeout" in refusal()  # at once
    engine.timeout_s = 30.0
    assert server.post(path, body).status_code == 429  # it could be done, but not now
    scheduler.lanes["bulk"].reserved_tokens -= 10_000
    assert 'sbert_errors_total{kind="too_large",model="small"} 2.0' in server.client.get("/metrics").text


# Clients that leave -------------------------------------------------------------------------------


def leave(server: Running, text: str) -> None:
    """Send a request, and close without waiting for the response."""
    url = httpx.URL(server.url)
    assert url.port is not None
    body = b'{"inputs": "%s"}' % text.encode()
    with socket.create_connection((url.host, url.port)) as connection:
        head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n%s" % (len(body), body))


def test_a_client_that_leaves_after_a_large_body_is_noticed(
    start_server: Callable[..., Running], fakes: list[FakeBackend], gate: Gate
) -> None:
    """Reading pauses during a large body, but a closed connection is only seen while reading."""
    server = start_server()
    stats = server.server.models.first.engine.stats
    fakes[0].fault = gate
    with ThreadPoolExecutor(3) as threads:
        held = hold_workers(server, gate, threads)
        leave(server, f"text{' ' * 300_000}")
        until(lambda: stats().errors.get("CancelledError") == 1)
        assert stats().queued_texts == 0
        gate.opened.set()
        assert [answer.result().status_code for answer in held] == [200, 200]


def test_work_is_dropped_for_clients_that_leave(
    start_server: Callable[..., Running], fakes: list[FakeBackend], gate: Gate
) -> None:
    server = start_server()
    stats = server.server.models.first.engine.stats
    fakes[0].fault = gate
    before, requests = sum(fakes[0].seen), stats().requests
    with ThreadPoolExecutor(3) as threads:
        held = hold_workers(server, gate, threads)
        for number in range(1000):
            leave(server, f"leaves {number}")
        until(lambda: stats().requests >= requests + 1002)
        until(lambda: stats().queued_texts == 0)
        assert stats().queued_tokens == 0
        gate.opened.set()
        assert [answer.result().status_code for answer in held] == [200, 200]
    assert sum(fakes[0].seen) - before < 100  # those that left before they had to wait
    metrics = server.client.get("/metrics").text
    assert 'sbert_http_requests_total{route="/embed",status="499"}' in metrics
    assert "sbert_http_requests_in_progress 1.0" in metrics  # the one that asks
    until(lambda: server.connections() <= 3)
