"""The priority and the key of a request: who waits for whom, and who is refused because of whom."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import pytest

from sbert_infer.scheduling.lane import Lane
from sbert_infer.types import Priority
from tests.sbert_infer.serve.conftest import Running

MANY = {"inputs": [f"number {number} of many texts" for number in range(500)]}
DEPLOYMENT = "/openai/deployments/small/embeddings"


def lane_of(server: Running, priority: Priority) -> Lane:
    return server.server.models.first.engine._queue.scheduler.lanes[priority]


def status(server: Running, body: Mapping[str, object], key: str = "", **headers: str) -> int:
    keys = {"authorization": f"Bearer {key}"} if key else {}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.post("/embed", body, headers={**keys, **named}).status_code


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/embeddings", "input"), (DEPLOYMENT, "input"), ("/embed", "inputs"), ("/rerank", "query")]
)
def test_a_priority_that_does_not_exist_is_named(server: Running, path: str, field: str) -> None:
    response = server.post(path, {field: "a cat"}, headers={"x-priority": "urgent"})
    assert response.status_code == 400
    assert "X-Priority must be interactive or bulk, got 'urgent'" in response.text


@pytest.mark.parametrize("given", ["interactive", "Bulk"])
def test_priorities_do_not_change_vectors(server: Running, given: str) -> None:
    plain = server.post("/embed", {"inputs": "a cat"})
    named = server.post("/embed", {"inputs": "a cat"}, headers={"x-priority": given})
    assert named.status_code == 200
    assert named.json() == plain.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a cat"}),
        (DEPLOYMENT, {"input": "a cat"}),
        ("/v2/embed", {"texts": ["a cat"]}),
        ("/score", {"text_1": "a cat", "text_2": "a dog"}),
    ],
)
def test_a_body_may_say_that_it_can_wait(
    start_server: Callable[..., Running], path: str, body: dict[str, object]
) -> None:
    server = start_server()
    lane_of(server, "bulk").reserved_tokens += 2**20  # as if that much were being tokenized
    found = [server.post(path, {**body, "priority": number}).status_code for number in (None, 0, -1, 1, 999)]
    assert found == [200, 200, 200, 429, 429]
    header = {"x-priority": "interactive"}
    assert server.post(path, {**body, "priority": 1}, headers=header).status_code == 200


def test_bulk_that_fills_its_queue_refuses_bulk_only(start_server: Callable[..., Running]) -> None:
    server = start_server()
    lane_of(server, "bulk").reserved_tokens += 2**20  # as if that much were being tokenized
    assert status(server, {"inputs": "a cat"}) == 200
    assert status(server, {"inputs": "a cat"}, x_priority="bulk") == 429
    assert status(server, MANY) == 429  # by its size
    assert status(server, MANY, x_priority="interactive") == 200
    lane_of(server, "bulk").reserved_tokens -= 2**20
    assert status(server, MANY) == 200


def test_a_key_that_fills_the_queue_refuses_itself_only(start_server: Callable[..., Running]) -> None:
    server = start_server(keys=("first", "second"))
    lane = lane_of(server, "interactive")
    lane.reserved_tokens += 2**20
    lane.hold(hashlib.sha256(b"first").digest(), 2**20)
    assert status(server, {"inputs": "a cat"}, "first") == 429
    assert status(server, {"inputs": "a cat"}, "second") == 200
    assert status(server, {"inputs": "a cat"}, "third") == 401
    assert len(lane.held) == 1  # what has ended is not kept


def test_the_header_is_described(server: Running) -> None:
    described = server.client.get("/openapi.json").json()["paths"]
    (parameter,) = described["/embed"]["post"]["parameters"]
    assert (parameter["name"], parameter["schema"]["enum"]) == ("X-Priority", ["interactive", "bulk"])
    assert "parameters" not in described["/tokenize"]["post"]
