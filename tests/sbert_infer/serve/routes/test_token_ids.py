"""Ids of the model's own tokenizer instead of texts, where the server allows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from sbert_infer import Engine
from tests.sbert_infer.serve.conftest import Running

TEXTS = ["A cat sat.", "A feline was sitting.", "A cat sat."]


def test_ids_give_the_vectors_of_their_texts(start_server: Callable[..., Running], served_onnx: Path) -> None:
    server = start_server(allow_token_ids=True)
    with Engine(served_onnx) as engine:
        ids = engine.tokenizer(TEXTS)["input_ids"]
        expected = engine.encode(TEXTS, normalize_embeddings=True)
    answer = server.post("/v1/embeddings", {"input": ids}).json()
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], expected, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    (one,) = server.post("/v1/embeddings", {"input": ids[1]}).json()["data"]
    np.testing.assert_allclose(one["embedding"], expected[1], atol=1e-6)
    for path in ("/embed", "/"):
        np.testing.assert_allclose(server.post(path, {"inputs": ids}).json(), expected, atol=1e-6)


def test_what_can_be_no_ids(start_server: Callable[..., Running]) -> None:
    server = start_server(allow_token_ids=True)
    for ids, message in (
        ([[1, 2], [10**6]], "1000000"),
        ([[1, 2], []], "length >= 1"),
        ([1, [2]], "not a mixture"),
        ([[-1]], ">= 0"),
        ([["a"]], "Expected"),
    ):
        response = server.post("/v1/embeddings", {"input": ids})
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
    too_long = server.post("/v1/embeddings", {"input": [[5] * 65]})
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    prompted = server.post("/v1/embeddings", {"input": [[5]], "prompt_name": "query"})
    assert "prompt_name is for texts" in prompted.json()["error"]["message"]
