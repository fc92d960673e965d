"""Clients that say that they will send no more, and wait for their responses."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.doubles.backend import FakeBackend, Gate
from tests.sbert_infer.serve import test_faults
from tests.sbert_infer.serve.conftest import Running, until
from tests.sbert_infer.serve.http.test_admission import ask
from tests.sbert_infer.serve.http.test_limits import connect, read_all

fakes, gate = test_faults.fakes, test_faults.gate
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def answer_to(server: Running, sent: bytes) -> bytes:
    with connect(server) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection).replace(CONTINUE, b"")  # sent if the machine is slow


def test_a_client_that_ends_its_side_gets_its_answer(server: Running) -> None:
    expected = server.post("/embed", {"inputs": "a cat"}).json()
    for _ in range(20):
        answer = answer_to(server, ask("a cat"))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == expected
    assert answer_to(server, ask("a cat") * 3).count(b"HTTP/1.1 200 OK") == 3
    assert answer_to(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
    until(lambda: server.connections() <= 1)  # the fixture's own


def test_half_a_request_gets_none(server: Running) -> None:
    for sent in (b"", ask("a cat")[:20], ask("a cat")[:-5]):
        assert answer_to(server, sent) == b""


@pytest.mark.parametrize("leaves", [False, True])
def test_a_client_that_waits_is_told_from_one_that_has_left(
    start_server: Callable[..., Running], fakes: list[FakeBackend], gate: Gate, leaves: bool
) -> None:
    server = start_server()
    stats = server.server.models.first.engine.stats
    fakes[0].fault = gate
    with ThreadPoolExecutor(3) as threads:
        held = test_faults.hold_workers(server, gate, threads)
        with connect(server) as connection:
            connection.sendall(ask("a cat"))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE  # it is being looked for
            assert stats().queued_texts == 1
            if not leaves:
                gate.opened.set()
                assert read_all(connection).replace(CONTINUE, b"").startswith(b"HTTP/1.1 200 OK")
        if leaves:
            until(lambda: stats().errors.get("CancelledError") == 1)
            assert stats().queued_texts == 0
        gate.opened.set()
        assert [answer.result().status_code for answer in held] == [200, 200]
