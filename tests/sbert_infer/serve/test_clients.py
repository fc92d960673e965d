"""Real clients, unmodified, against a real server with MiniLM.

They have an environment of their own: see tests/clients.txt.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.serve.settings import ModelFile, Settings
from tests.doubles.backend import FakeBackend, Gate
from tests.sbert_infer.serve.conftest import Running, start, until
from tests.sbert_infer.serve.real_clients import KEY, NEWEST_OPENAI, needs_clients, run_client

# More than the 32 that other servers take at once, of all lengths, none like another.
TEXTS = [f"{word} {number} times" for number, word in enumerate(["cats", "rain", "a tune", "to trade"] * 9)]
TEXTS += [
    "",
    "naïve café 🙂",
    'line\nbreak "quoted" \\ \u0000',
    "A long story about the sea and those who sail it. " * 20,
]

pytestmark = needs_clients


@pytest.fixture(scope="module")
def server(minilm_onnx: Path) -> Iterator[Running]:
    running = start(Settings((ModelFile(minilm_onnx, "minilm"),), port=0, keys=(KEY,)))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def expected(minilm_onnx: Path) -> Any:
    with Engine(minilm_onnx) as engine:
        return engine.encode(TEXTS)


def check(vectors: dict[str, list[list[float]]], expected: Any) -> None:
    """Check the vectors that a client got, in order.

    They are of all texts, of all that aren't empty, or of the first few of those.
    """
    filled = expected[[index for index, text in enumerate(TEXTS) if text]]
    for name, found in vectors.items():
        whole = expected if len(found) == len(expected) else filled[: len(found)]
        np.testing.assert_allclose(np.array(found, np.float32), whole, atol=1e-6, err_msg=name)
        assert (np.sum(np.array(found) * whole, axis=1) >= 0.99999).all(), name


def test_texts_can_be_told_apart(expected: Any) -> None:
    """Otherwise the order of the vectors would not be checked."""
    cosines = expected @ expected.T - np.eye(len(expected))
    assert cosines.max() < 0.9999


@pytest.mark.parametrize("newest", [False, True], ids=["openai-2", "openai-newest"])
def test_openai(server: Running, expected: Any, newest: bool) -> None:
    found = run_client("openai_client", server.url, newest=newest, texts=TEXTS)
    check(found["vectors"], expected)
    assert set(found["vectors"]) == {"default", "float", "async"}
    short = expected[:, :64] / np.linalg.norm(expected[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(found["short"], short, atol=1e-6)
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(found["packed"]), "<f4"), expected[0], atol=1e-6)
    assert "minilm" in found["names"]
    assert not (newest and NEWEST_OPENAI) or found["version"] in NEWEST_OPENAI[-1].name


def test_langchain_is_told_what_to_change_and_then_works(server: Running, expected: Any) -> None:
    found = run_client("langchain_client", server.url, texts=TEXTS)
    assert "check_embedding_ctx_length=False" in found["refusal"]
    check(found["vectors"], expected)


def test_huggingface_hub(server: Running, expected: Any) -> None:
    found = run_client("huggingface_client", server.url, texts=TEXTS)
    check(found["vectors"], expected)
    filled = expected[[index for index, text in enumerate(TEXTS) if text]]
    np.testing.assert_allclose(found["cosines"], filled @ filled[0], atol=1e-6)


def test_llama_index(server: Running, expected: Any, minilm_onnx: Path) -> None:
    found = run_client("llama_index_client", server.url, texts=TEXTS)
    check(found["vectors"], expected)
    with Engine(minilm_onnx, on_truncate="ignore") as engine:  # it asks to truncate
        np.testing.assert_allclose(found["long"], engine.encode("word " * 5000), atol=1e-6)


@pytest.mark.parametrize("name", ["haystack", "chromadb", "litellm"])
def test_others(server: Running, expected: Any, name: str) -> None:
    found = run_client(f"{name}_client", server.url, texts=TEXTS, newest=name != "litellm")
    check(found["vectors"], expected)
    assert len(found["vectors"]) == 3
    assert name != "litellm" or "model 'unknown' is not served here" in found["unknown"]


# Errors -------------------------------------------------------------------------------------------


def test_openai_raises_the_fitting_exception(server: Running) -> None:
    calls = {
        "AuthenticationError": ({"key": "another"}, "no valid API key", "invalid_api_key", None),
        "NotFoundError": ({"model": "gpt"}, "only: minilm", "model_not_found", "model"),
        "BadRequestError": (
            {"input": "word " * 5000},
            "input 0 is longer",
            "context_length_exceeded",
            "input",
        ),
    }
    answers = run_client("openai_errors", server.url, texts=TEXTS, calls=[call for call, *_ in calls.values()])
    for (kind, (_, message, code, param)), answer in zip(calls.items(), answers, strict=True):
        assert (answer["type"], answer["tries"]) == (kind, 1)
        assert message in answer["body"]["message"]
        assert (answer["body"]["code"], answer["body"]["param"]) == (code, param)


def test_openai_waits_as_told_before_it_tries_again(
    start_server: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double stands in for the model, to hold the queue full."""
    gate = Gate()
    backend = FakeBackend()
    monkeypatch.setattr("sbert_infer.opening.open_backend", lambda *_: backend)
    server = start_server(keys=(KEY,), max_queue_tokens=100)
    backend.fault = gate
    with ThreadPoolExecutor(3) as threads:
        try:
            held = []
            for number in range(2):  # one after the other, or they could run together
                held.append(threads.submit(server.post, "/embed", {"inputs": f"held {number}"}))
                assert gate.entered.acquire(timeout=20)
            held.append(threads.submit(server.post, "/embed", {"inputs": [str(number) for number in range(20)]}))
            until(lambda: server.server.models.first.engine.stats().queued_texts > 0)
            call = {"input": [f"{number}" for number in range(20)], "max_retries": 1}
            (answer,) = run_client("openai_errors", server.url, texts=TEXTS, model="small", calls=[call])
        finally:
            gate.opened.set()
        assert [future.result().status_code for future in held] == [200] * 3
    assert (answer["type"], answer["tries"]) == ("RateLimitError", 2)
    told_s = int(answer["retry-after-ms"]) / 1000
    assert told_s >= 1  # by itself, it would wait for half a second
    assert answer["waits"][0] >= told_s
