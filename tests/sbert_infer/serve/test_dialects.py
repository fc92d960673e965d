"""Clients of other servers, unmodified, against a real server with a small model and a reranker.

Each has one script in clients/; the vectors that it gets are compared with the engine's.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine, Reranker
from sbert_infer.serve.settings import ModelFile, Settings
from sbert_infer.serve.wire.vectors import convert
from tests.sbert_infer.serve.conftest import Running, start
from tests.sbert_infer.serve.real_clients import KEY, needs_clients, run_client

QUERY = "Who sat?"
TEXTS = ["A cat sat.", "Rain fell on the tin roof.", "naïve café 🙂", "to trade or not"]
LONG = "word " * 500

pytestmark = needs_clients


@pytest.fixture(scope="module")
def server(served_onnx: Path, reranker_onnx: Path) -> Iterator[Running]:
    models = (ModelFile(served_onnx, "small"), ModelFile(reranker_onnx, "reranker"))
    running = start(Settings(models, port=0, drain_s=5.0, keys=(KEY,)))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def open_server(served_onnx: Path) -> Iterator[Running]:
    """The same without keys, for a client that can't send any."""
    running = start(Settings((ModelFile(served_onnx, "small"),), port=0, drain_s=5.0))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def expected(served_onnx: Path) -> dict[str, Any]:
    """Vectors of length 1 as the engine gives them, without a prompt, for queries and documents."""
    with Engine(served_onnx, on_truncate="ignore") as engine:
        options: dict[str, Any] = {"normalize_embeddings": True}
        return {
            "plain": engine.encode(TEXTS, **options),
            "query": engine.encode_query(TEXTS, **options),
            "document": engine.encode_document(TEXTS, **options),
            "raw": engine.encode(TEXTS),
            "long": engine.encode(LONG, **options),
        }


@pytest.fixture(scope="module")
def best(reranker_onnx: Path) -> list[tuple[int, float]]:
    """The two best texts, with scores from 0 to 1."""
    with Reranker(reranker_onnx) as reranker:
        ranks = reranker.rank(QUERY, TEXTS, activation_fn="sigmoid", top_k=2)
    return [(item["corpus_id"], item["score"]) for item in ranks]


def run(name: str, server: Running, **given: Any) -> Any:
    return run_client(name, server.url, model="small", reranker="reranker", texts=TEXTS, query=QUERY, **given)


def check(found: dict[str, dict[str, Any]], expected: dict[str, Any]) -> None:
    for kind, by_client in found.items():
        for name, vectors in by_client.items():
            np.testing.assert_allclose(vectors, expected[kind], atol=1e-6, err_msg=f"{kind} {name}")


def check_ranks(found: list[dict[str, Any]], best: list[tuple[int, float]]) -> None:
    score = "relevance_score" if "relevance_score" in found[0] else "score"
    assert [item["index"] for item in found] == [index for index, _ in best]
    np.testing.assert_allclose([item[score] for item in found], [score for _, score in best], atol=1e-5)


def shortened(vectors: Any) -> Any:
    return vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)


def test_the_prompts_make_a_difference(expected: dict[str, Any]) -> None:
    """Otherwise no test here would notice a prompt that is missing."""
    kinds = [expected[kind] for kind in ("plain", "query", "document")]
    assert all(np.abs(one - other).max() > 0.01 for one, other in zip(kinds, kinds[1:] + kinds[:1], strict=True))


def test_litellm(server: Running, open_server: Running, expected: dict[str, Any], best: Any) -> None:
    found = run("litellm_dialects", server, newest=False, open_url=open_server.url)
    check(found["vectors"], expected)
    for name, vectors in found["short"].items():
        np.testing.assert_allclose(vectors, shortened(expected["plain"]), atol=1e-6, err_msg=name)
    for name, ranks in found["ranks"].items():
        check_ranks(ranks[:2], best)
        assert ranks[0]["document"]["text"] == TEXTS[best[0][0]], name


def test_cohere(server: Running, expected: dict[str, Any], best: Any) -> None:
    found = run("cohere_client", server)
    packed = [np.frombuffer(base64.b64decode(row), "<f4") for row in found["by_type"].pop("base64")]
    np.testing.assert_allclose(packed, expected["query"], atol=1e-6)
    np.testing.assert_allclose(found["by_type"].pop("float"), expected["query"], atol=1e-6)
    for kind, rows in found["by_type"].items():
        assert np.abs(np.array(rows) - convert(expected["query"], kind).astype(int)).max() <= 1, kind
    np.testing.assert_allclose(found["plain"], expected["document"], atol=1e-6)
    np.testing.assert_allclose(found["short"], shortened(expected["document"]), atol=1e-6)
    check_ranks(found["ranks"]["new"], best)
    check_ranks(found["ranks"]["old"], best)
    assert found["ranks"]["old"][0]["document"]["text"] == TEXTS[best[0][0]]
    assert found["refusal"]["message"].startswith("model 'unknown' is not served here")


def test_voyage(server: Running, expected: dict[str, Any], best: Any) -> None:
    found = run("voyage_client", server)
    check({kind: {"voyage": vectors} for kind, vectors in found["vectors"].items()}, expected)
    for kind, rows in found["types"].items():
        assert np.abs(np.array(rows) - convert(expected["query"], kind).astype(int)).max() <= 1, kind
    np.testing.assert_allclose(found["short"], shortened(expected["plain"]), atol=1e-6)
    check_ranks(found["ranks"], best)
    assert "input 0 is longer than the model's limit" in found["refusal"]


def test_nvidia(server: Running, expected: dict[str, Any], best: Any) -> None:
    found = run("nvidia_client", server)
    check({kind: {"nvidia": vectors} for kind, vectors in found["vectors"].items()}, expected)
    np.testing.assert_allclose(found["short"], shortened(expected["document"]), atol=1e-6)
    assert "input 0 is longer than the model" in found["refusal"]
    assert [item["text"] for item in found["ranks"]] == [TEXTS[index] for index, _ in best]
    logits = np.array([item["logit"] for item in found["ranks"]])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), [score for _, score in best], atol=1e-5)


def test_ollama(server: Running, expected: dict[str, Any]) -> None:
    found = run("ollama_client", server)
    np.testing.assert_allclose(found["vectors"], expected["plain"], atol=1e-6)
    np.testing.assert_allclose(found["older"], expected["raw"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["short"], shortened(expected["plain"])[0], atol=1e-6)
    np.testing.assert_allclose(found["long"], expected["long"], atol=1e-6)
    assert found["tokens"] > len(TEXTS)
    (unknown, message), (too_long, reason) = found["refusals"]
    assert (unknown, too_long) == (404, 413)
    assert message.startswith("model 'unknown' is not served here")
    assert "input 0 is longer than the model's limit" in reason


@pytest.mark.parametrize("newest", [False, True], ids=["openai-2", "openai-newest"])
def test_openai_for_azure_and_with_fields_of_others(server: Running, expected: dict[str, Any], newest: bool) -> None:
    found = run("azure_client", server, newest=newest)
    check(found["vectors"], expected)
    np.testing.assert_array_equal(found["bits"], convert(expected["plain"], "ubinary"))
    packed = np.stack([np.frombuffer(base64.b64decode(row), np.int8) for row in found["bytes"]])
    assert np.abs(packed.astype(int) - convert(expected["plain"], "int8")).max() <= 1
    unknown, contradiction, stranger = found["refusals"]
    assert "input_type 'poem' is unknown, use one of: query, " in unknown
    assert "input_type and task contradict each other" in contradiction
    assert "no valid API key" in stranger
