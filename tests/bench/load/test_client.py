"""The load generator against a double of a server: what it sends when, and what it reports."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from sbert_infer.bench.load.client import Exchange, LoadClient, run_loop
from sbert_infer.bench.load.schedule import poisson_arrivals
from sbert_infer.bench.load.target import Target, count_wrong, decode_response, parse_target
from tests.doubles.openai import OpenAIDouble, running, vector_of

TEXTS = ["one", "two", "a third text, Übergröße"]


@pytest.fixture
def double() -> Iterator[OpenAIDouble]:
    with running(OpenAIDouble()) as server:
        yield server


def client_of(target: Target, timeout_s: float = 30.0, encoding_format: str = "base64") -> LoadClient:
    return LoadClient(target, [target.request([text], encoding_format) for text in TEXTS], timeout_s)


def open_loop(
    double: OpenAIDouble, rate: float, duration_s: float, timeout_s: float = 30.0, connections: int = 4
) -> list[Exchange]:
    arrivals = poisson_arrivals(rate, duration_s, 0).tolist()
    order = list(itertools.islice(itertools.cycle(range(len(TEXTS))), len(arrivals)))
    return run_loop(client_of(parse_target(double.url), timeout_s).open_loop(arrivals, order, connections))


def errors(exchanges: list[Exchange]) -> Counter[str]:
    return Counter(exchange.error for exchange in exchanges)


@pytest.mark.parametrize("encoding_format", ["base64", "float"])
@pytest.mark.parametrize("chunked", [False, True])
def test_every_response_is_that_of_its_request(double: OpenAIDouble, encoding_format: str, chunked: bool) -> None:
    double.chunked = chunked
    order = iter([0, 1, 2] * 20)
    exchanges = run_loop(client_of(parse_target(double.url), 30, encoding_format).closed_loop(4, order))
    assert len(exchanges) == double.requests == 60
    expected = np.stack([vector_of(text) for text in TEXTS])
    for exchange in exchanges:
        assert exchange.status == 200
        assert count_wrong(exchange.body, [exchange.request], expected, 0.99999) == 0
        assert count_wrong(exchange.body, [(exchange.request + 1) % 3], expected, 0.99999) == 1
    assert double.connections == 4  # kept alive


def test_arrivals_do_not_wait_for_responses(double: OpenAIDouble) -> None:
    arrivals = poisson_arrivals(100, 0.3, 0).tolist()
    double.hold_until = len(arrivals)
    exchanges = run_loop(client_of(parse_target(double.url)).open_loop(arrivals, [0] * len(arrivals), 4))
    assert len(exchanges) > 15
    assert double.requests == len(exchanges)
    assert errors(exchanges) == {"": len(exchanges)}  # no response before all were sent
    assert double.connections == len(exchanges)


def test_a_burst_opens_a_connection_for_each_request(double: OpenAIDouble) -> None:
    double.hold_until = 300
    exchanges = run_loop(client_of(parse_target(double.url)).open_loop([0.0] * 300, [0] * 300, 1))
    assert errors(exchanges) == {"": 300}
    assert double.connections == 300


def test_no_request_waits_for_ever(double: OpenAIDouble) -> None:
    double.hold_until = 10**9
    exchanges = open_loop(double, 100, 0.3, timeout_s=0.5)
    assert len(exchanges) > 15
    assert errors(exchanges) == {"timeout": len(exchanges)}
    assert all(exchange.latency_s >= 0.5 for exchange in exchanges)


def test_a_stall_affects_every_request_due_meanwhile(double: OpenAIDouble) -> None:
    double.stall_at, double.stall_s = 30, 0.6
    latencies = [exchange.latency_s for exchange in open_loop(double, 100, 1.2)]
    assert max(latencies) >= 0.6
    assert sum(latency > 0.1 for latency in latencies) > 30  # of some 50 due in the first 0.5 s of it
    assert np.percentile(latencies, 99) > 0.4


def test_waiting_for_a_connection_counts_as_latency(double: OpenAIDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.bench.load.client.MAX_CONNECTIONS", 1)
    double.service_s = 0.02
    exchanges = open_loop(double, 200, 0.15, connections=1)
    assert double.connections == 1
    assert errors(exchanges) == {"": len(exchanges)}
    for place, exchange in enumerate(exchanges):  # each waits 20 ms for all before it, less clock granularity
        assert exchange.done - exchanges[0].due >= 0.019 * (place + 1)
    assert exchanges[-1].latency_s > exchanges[-1].done - exchanges[-1].sent


def test_refusals_failures_and_dropped_connections_are_told_apart(double: OpenAIDouble) -> None:
    double.drop_every, double.fail_every = 7, 5
    exchanges = open_loop(double, 200, 0.6)
    assert double.requests == len(exchanges)
    dropped = double.requests // 7
    failed = double.requests // 5 - double.requests // 35
    assert errors(exchanges)["connection lost"] == dropped
    assert Counter(exchange.status for exchange in exchanges) == {
        0: dropped,
        500: failed,
        200: double.requests - dropped - failed,
    }


def test_what_is_not_http_is_an_error(double: OpenAIDouble) -> None:
    double.garbage = True
    exchanges = open_loop(double, 100, 0.3)
    assert errors(exchanges) == {"not HTTP": len(exchanges)}


def test_a_closed_port_is_an_error_for_each_request() -> None:
    with socket.socket() as taken:  # bound but not listening, so that the port stays closed
        taken.bind(("127.0.0.1", 0))
        target = parse_target(f"http://127.0.0.1:{taken.getsockname()[1]}")
        exchanges = run_loop(client_of(target).open_loop([0.0, 0.1], [0, 1], 1))
        assert errors(exchanges) == {"no connection": 2}
        closed = run_loop(client_of(target).closed_loop(2, iter([0, 1, 2])))
        assert errors(closed) == {"no connection": 3}


def test_a_closed_loop_ends_in_time_and_waits_for_its_responses(double: OpenAIDouble) -> None:
    double.service_s = 0.01
    exchanges = run_loop(client_of(parse_target(double.url)).closed_loop(8, itertools.repeat(0), 0.3))
    assert double.requests == len(exchanges) >= 8
    assert errors(exchanges) == {"": len(exchanges)}
    assert exchanges[-1].due - exchanges[0].due <= 0.3


def test_the_key_is_sent_and_not_shown(double: OpenAIDouble) -> None:
    target = replace(parse_target(double.url), api_key="secret")
    assert target.first_model() == "double"
    run_loop(client_of(target).closed_loop(1, iter([0])))
    assert double.authorizations == {"Bearer secret"}
    assert "secret" not in repr(target)


RESPONSE = b'{"data": [{"index": 1, "embedding": [0, 1]}, {"index": 0, "embedding": [1, 0]}]}'


def test_vectors_are_put_in_the_order_of_their_index() -> None:
    vectors = decode_response(RESPONSE)
    assert vectors is not None
    assert vectors.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"data": []}',
        b'{"data": [{"index": 1, "embedding": [0, 1]}]}',
        b'{"data": [{"index": 0, "embedding": "AAAA*"}]}',
        b'{"data": [{"index": 0, "embedding": null}]}',
        b'{"data": [{"index": 0, "embedding": [NaN, 1]}]}',
        b'{"data": [{"index": 0, "embedding": [1, 0, 0]}]}',
        b'{"data": [{"index": 0, "embedding": [0, 0]}]}',
        RESPONSE,  # one vector too many
    ],
)
def test_anything_but_the_expected_vector_is_wrong(body: bytes) -> None:
    assert count_wrong(body, [0], np.array([[1, 0]], np.float32), 0.9) == 1


def test_only_the_wrong_vectors_of_a_response_count() -> None:
    expected = np.array([[1, 0], [1, 0]], np.float32)
    assert count_wrong(RESPONSE, [0, 1], expected, 0.9) == 1
