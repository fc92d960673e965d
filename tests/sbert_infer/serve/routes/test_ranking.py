"""Reranking with `documents`, NIM's ranking and vLLM's scores, by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine, Reranker
from sbert_infer.serve.settings import ModelFile, Settings
from tests.sbert_infer.serve.conftest import Running, start

QUERY = "Who sat?"
TEXTS = ["A cat sat.", "Rain fell on the tin roof.", "", "naïve café 🙂"]
LONG = "word " * 500


@pytest.fixture(scope="module")
def server(reranker_onnx: Path, served_onnx: Path) -> Iterator[Running]:
    models = (ModelFile(served_onnx, "encoder"), ModelFile(reranker_onnx, "reranker"))
    running = start(Settings(models, port=0, drain_s=5.0))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def scores(reranker_onnx: Path) -> Any:
    """Of the query with each text, from 0 to 1."""
    with Reranker(reranker_onnx) as reranker:
        return reranker.predict([(QUERY, text) for text in TEXTS], activation_fn="sigmoid")


def post(server: Running, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_scores(server: Running, scores: Any, path: str) -> None:
    answer = post(server, path, query=QUERY, documents=TEXTS, model="reranker")
    order = np.argsort(-scores)
    assert [item["index"] for item in answer["results"]] == order.tolist()
    np.testing.assert_allclose([item["relevance_score"] for item in answer["results"]], scores[order], atol=1e-5)
    assert all(item.keys() == {"index", "relevance_score"} for item in answer["results"])
    assert answer["model"] == "reranker"
    assert answer["usage"]["total_tokens"] > 0
    assert answer["meta"]["api_version"]["version"] == "2"


def test_documents_may_be_objects_and_come_back(server: Running) -> None:
    documents: list[Any] = [{"text": TEXTS[0], "title": "ignored"}, *TEXTS[1:]]
    answer = post(server, "/v1/rerank", query=QUERY, documents=documents, top_n=2, return_documents=True)
    assert len(answer["results"]) == 2
    assert all(item["document"] == {"text": TEXTS[item["index"]]} for item in answer["results"])
    assert len(post(server, "/v1/rerank", query=QUERY, documents=documents, top_n=0)["results"]) == len(TEXTS)


def test_voyage_has_its_own_names(server: Running, scores: Any) -> None:
    body = {"query": QUERY, "documents": TEXTS, "top_k": 1, "truncation": True, "return_documents": True}
    answer = post(server, "/v1/rerank", **body)
    best = int(np.argmax(scores))
    assert answer["object"] == "list"
    (item,) = answer["data"]
    assert (item["index"], item["document"]) == (best, TEXTS[best])


def test_nims_logits_have_no_activation(server: Running, scores: Any) -> None:
    passages = [{"text": text} for text in TEXTS]
    rankings = post(server, "/v1/ranking", query={"text": QUERY}, passages=passages, truncate="END")["rankings"]
    order = np.argsort(-scores)
    assert [item["index"] for item in rankings] == order.tolist()
    logits = np.array([item["logit"] for item in rankings])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), scores[order], atol=1e-5)


def test_a_lone_reranker_serves_sagemaker(start_server: Callable[..., Running], reranker_onnx: Path) -> None:
    server = start_server(models=(ModelFile(reranker_onnx, "reranker"),))
    for path, body in (("/predict", {"inputs": [QUERY, TEXTS[0]]}), ("/rerank", {"query": QUERY, "texts": TEXTS})):
        wanted = server.post(path, body)
        assert wanted.status_code == 200, wanted.text
        assert server.post("/invocations", body).json() == server.post("/", body).json() == wanted.json()
    for path, methods in server.client.get("/openapi.json").json()["paths"].items():
        if "rank" in path or path in ("/", "/invocations", "/score"):
            example = methods["post"]["requestBody"]["content"]["application/json"]["example"]
            assert server.post(path, example).status_code == 200, path


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_score_one_with_many_and_in_pairs(server: Running, scores: Any, path: str, names: tuple[str, str]) -> None:
    first, second = names
    for one in (QUERY, [QUERY], [QUERY] * len(TEXTS)):
        answer = post(server, path, **{first: one, second: TEXTS}, model="reranker")
        assert [item["index"] for item in answer["data"]] == list(range(len(TEXTS)))
        np.testing.assert_allclose([item["score"] for item in answer["data"]], scores, atol=1e-5)


def test_an_encoder_scores_by_cosine(server: Running, served_onnx: Path) -> None:
    answer = post(server, "/score", text_1=QUERY, text_2=[*TEXTS, QUERY], model="encoder")
    with Engine(served_onnx) as engine:
        vectors = engine.encode([QUERY, *TEXTS, QUERY], normalize_embeddings=True)
    found = [item["score"] for item in answer["data"]]
    np.testing.assert_allclose(found, vectors[1:] @ vectors[0], atol=1e-6)


def test_long_texts_are_cut_where_the_contract_does(server: Running) -> None:
    cut = server.post("/v2/rerank", {"query": QUERY, "documents": [LONG, "a"]})
    assert (cut.status_code, cut.headers["x-truncated-texts"]) == (200, "1")
    scored = {"text_1": QUERY, "text_2": LONG}
    assert server.post("/score", scored).json()["error"]["code"] == "context_length_exceeded"
    assert server.post("/score", {**scored, "truncate_prompt_tokens": -1}).headers["x-truncated-texts"] == "1"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/rerank", {"query": QUERY, "documents": []}, 400, "length >= 1"),
        ("/v2/rerank", {"query": QUERY, "documents": ["a"], "model": "encoder"}, 404, "encoder is a sentence encoder"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"], "top_n": -1}, 400, "top_n"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"], "rank_fields": ["a"]}, 400, "rank_fields"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"], "max_tokens_per_doc": 3}, 400, "at least the 64 tokens"),
        (
            "/v1/rerank",
            {"query": QUERY, "documents": ["a"], "truncate_prompt_tokens": -1, "max_tokens_per_doc": 3},
            400,
            "max_tokens_per_doc must be -1, or at least the 64 tokens",
        ),
        ("/v1/rerank", {"query": QUERY, "documents": [LONG], "truncate": "NONE"}, 400, "input 0 is longer"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"], "truncate": False, "truncation": True}, 400, "contradict"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "top_n": 1, "top_k": 2}, 422, "contradict each other"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "2 and 1 texts make no pairs"),
        ("/v1/ranking", {"query": {"text": QUERY}, "passages": [{"text": LONG}]}, 400, "input 0 is longer"),
    ],
)
def test_what_is_refused(server: Running, path: str, body: Any, status: int, message: str) -> None:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    answer = response.json()
    said = {"/v2/rerank": "message", "/rerank": "error"}.get(path, "detail")
    assert message in answer[said]
