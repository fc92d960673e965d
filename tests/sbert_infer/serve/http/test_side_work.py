"""/tokenize and /decode run beside the models, within bounds of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sbert_infer.serve.routes import tei
from tests.sbert_infer.serve.conftest import Running

TEXT = {"inputs": "A cat sat."}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Semaphore, threading.Event]]:
    """Counts the calls of the tokenizer that have begun; they end once the event is set."""
    begun, may_end = threading.Semaphore(0), threading.Event()
    tokenize = tei._tokenize

    def slow(*arguments: Any) -> bytes:
        begun.release()
        may_end.wait()
        return tokenize(*arguments)

    monkeypatch.setattr(tei, "_tokenize", slow)
    yield begun, may_end
    may_end.set()


def test_a_flood_is_refused_and_delays_nothing_else(
    start_server: Callable[..., Running],
    gate: tuple[threading.Semaphore, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr("sbert_infer.serve.http.side_work._MOST", 2)
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    server = start_server(api_key_file=keys, admin_keys=("admin",))
    old, admin = {"authorization": "Bearer old"}, {"authorization": "Bearer admin"}
    begun, may_end = gate
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(server.post, "/tokenize", TEXT, headers=old) for _ in range(2)]
        for _ in asked:
            assert begun.acquire(timeout=30)
        refused = server.post("/tokenize", TEXT, headers=old)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert server.post("/decode", {"ids": [1]}, headers=old).status_code == 429
        keys.write_text("new\n")
        assert server.post("/admin/reload", {}, headers=admin).status_code == 200
        assert server.post("/tokenize", TEXT, headers=old).status_code == 401
        may_end.set()
        assert [each.result().status_code for each in asked] == [200, 200]


def test_it_has_a_deadline(
    start_server: Callable[..., Running], gate: tuple[threading.Semaphore, threading.Event]
) -> None:
    late = start_server(timeout_s=0.2).post("/tokenize", TEXT)
    assert late.status_code == 503
    assert "not done in time" in late.json()["error"]
