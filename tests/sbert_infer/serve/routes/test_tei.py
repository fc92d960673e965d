"""The routes of text-embeddings-inference, by hand and with huggingface_hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer

from sbert_infer import Engine
from tests.doubles.backend import run_ids
from tests.sbert_infer.serve.conftest import Running

TEXTS = ["A cat sat.", "A feline was sitting.", "naïve café 🙂"]
LONG = "word " * 500


@pytest.fixture(scope="module")
def engine(served_onnx: Path) -> Iterator[Engine]:
    with Engine(served_onnx, on_truncate="ignore") as engine:
        yield engine


def unit(engine: Engine, texts: list[str]) -> Any:
    return engine.encode(texts, normalize_embeddings=True)


def embed(server: Running, inputs: Any, path: str = "/embed", **options: Any) -> Any:
    response = server.post(path, {"inputs": inputs, **options})
    assert response.status_code == 200, response.text
    return np.array(response.json(), np.float32)


@pytest.mark.parametrize("path", ["/embed", "/"])
def test_vectors_come_as_rows_also_for_one_text(server: Running, engine: Engine, path: str) -> None:
    np.testing.assert_allclose(embed(server, TEXTS, path), unit(engine, TEXTS), atol=1e-6)
    np.testing.assert_allclose(embed(server, TEXTS[0], path), unit(engine, TEXTS[:1]), atol=1e-6)


def test_options(server: Running, engine: Engine) -> None:
    np.testing.assert_allclose(
        embed(server, TEXTS, dimensions=7, normalize=False, prompt_name="document", truncation_direction="Right"),
        engine.encode(TEXTS, truncate_dim=7, prompt_name="document"),
        atol=1e-6,
    )
    cut = embed(server, [LONG, LONG + "more"], truncate=True)
    np.testing.assert_allclose(cut, unit(engine, [LONG, LONG]), atol=1e-6)


@pytest.mark.parametrize("direction", ["left", "Left", "right"])
def test_long_texts_are_cut_where_asked(server: Running, engine: Engine, direction: str) -> None:
    text = f"the beginning {LONG} and the end"
    tokenizer = Tokenizer.from_str(engine.artifact.tokenizer_json)
    tokenizer.enable_truncation(engine.max_seq_length, direction=direction.lower())
    ids = np.array([tokenizer.encode(text).ids])
    kept = run_ids(engine.pipeline.backend, ids, np.ones_like(ids))
    found = embed(server, [text, "a short one"], truncate=True, truncation_direction=direction)
    np.testing.assert_allclose(found[:1], kept / np.linalg.norm(kept), atol=1e-6)
    np.testing.assert_allclose(found[1:], unit(engine, ["a short one"]), atol=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        ("/embed", {"inputs": ""}, 400, "Empty", "length >= 1"),
        ("/embed", {"inputs": []}, 400, "Empty", "length >= 1"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty", "inputs[1]"),
        ("/embed", {"inputs": ["a"] * 2049}, 413, "Validation", "length <= 2048"),
        ("/embed", {"inputs": ["a", LONG], "truncate": False}, 413, "Validation", "input 1 is longer"),
        ("/embed", {"inputs": 3}, 422, "Validation", "inputs"),
        ("/embed", {"inputs": [[1, 2]]}, 422, "Tokenizer", "--allow-token-ids"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "Validation", "truncation_direction"),
        (
            "/embed",
            {"inputs": LONG, "truncate": False, "truncation_direction": "left"},
            413,
            "Validation",
            "input 0 is longer",
        ),
        ("/embed", {"inputs": "a", "model": "other"}, 404, "Validation", "only: small"),
        ("/embed_all", {"inputs": "a"}, 404, "Backend", "without token outputs"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty", "sentences"),
        ("/", {"inputs": {"source_sentence": "a"}}, 422, "Validation", "sentences"),
        ("/tokenize", {"inputs": "x" * (2**20 + 1)}, 413, "Validation", "characters"),
        ("/nowhere", {"inputs": "a"}, 404, "Validation", "no such path"),
    ],
)
def test_errors(server: Running, path: str, body: Any, status: int, kind: str, message: str) -> None:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()
    assert set(error) == {"error", "error_type"}
    assert error["error_type"] == kind
    assert message in error["error"]


@pytest.mark.parametrize("path", ["/similarity", "/"])
def test_similarity_is_the_cosine(server: Running, engine: Engine, path: str) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    found = embed(server, inputs, path, parameters={"prompt_name": "query"})
    vectors = engine.encode(TEXTS, prompt_name="query")
    np.testing.assert_allclose(found, engine.similarity(vectors[:1], vectors)[0], atol=1e-6)


def test_tokens_name_their_characters(server: Running, engine: Engine) -> None:
    (tokens,) = server.post("/tokenize", {"inputs": "A cat sät."}).json()
    assert [token["id"] for token in tokens] == engine.tokenizer.encode("A cat sät.")
    assert [token["special"] for token in tokens][:: len(tokens) - 1] == [True, True]
    plain = [token for token in tokens if not token["special"]]
    assert all(token["text"] == "A cat sät."[token["start"] : token["stop"]] for token in plain)
    assert "".join(token["text"] for token in plain) == "Acatsät."
    bare = server.post("/tokenize", {"inputs": ["A cat sät.", LONG], "add_special_tokens": False}).json()
    assert bare[0] == plain
    assert len(bare[1]) >= 500  # uncut


def test_long_texts_are_cut_unless_the_request_says_otherwise(server: Running, engine: Engine) -> None:
    response = server.post("/embed", {"inputs": ["a", LONG]})
    np.testing.assert_allclose(response.json(), unit(engine, ["a", LONG]), atol=1e-6)
    assert response.headers["x-truncated-texts"] == "1"
    assert server.client.get("/info").json()["auto_truncate"]


def test_unknown_fields_are_ignored(server: Running) -> None:
    plain = server.post("/embed", {"inputs": TEXTS}).json()
    assert server.post("/embed", {"inputs": TEXTS, "parameters": {"a": 1}, "top_k": None}).json() == plain
    assert server.post("/tokenize", {"inputs": "a", "whatever": 1}).status_code == 200


def test_ids_become_texts_again(server: Running, engine: Engine) -> None:
    ids = engine.tokenizer(["a cat sat", "rain"])["input_ids"]
    assert server.post("/decode", {"ids": ids}).json() == ["a cat sat", "rain"]
    assert server.post("/decode", {"ids": ids[1]}).json() == ["rain"]
    (whole,) = server.post("/decode", {"ids": ids[1], "skip_special_tokens": False}).json()
    assert whole.startswith("[CLS]")
    for wrong, status, message in (([], 400, "length >= 1"), ([10**6], 422, "token id over"), ([-1], 422, ">= 0")):
        response = server.post("/decode", {"ids": wrong})
        assert response.status_code == status, response.text
        assert message in response.json()["error"]


def test_sagemakers_and_openais_paths(server: Running) -> None:
    assert server.client.get("/ping").json() == {"status": "ready"}
    assert server.post("/invocations", {"inputs": TEXTS}).json() == server.post("/embed", {"inputs": TEXTS}).json()
    pair = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}
    assert server.post("/invocations", pair).json() == server.post("/similarity", pair).json()
    wanted = server.post("/v1/embeddings", {"input": TEXTS}).json()
    assert server.post("/embeddings", {"input": TEXTS}).json() == wanted
    assert server.post("/embeddings", {"input": 3}).json()["error"]["code"] == "invalid_request"
    long = {"input": LONG, "whatever": 1}
    assert server.post("/embeddings", long).headers["x-truncated-texts"] == "1"
    assert server.post("/embeddings", {**long, "truncate": False}).status_code == 400
    assert server.post("/v1/embeddings", long).json()["error"]["message"].endswith("unknown field `whatever`")


def test_info(server: Running, engine: Engine) -> None:
    info = server.client.get("/info").json()
    assert info["model_id"] == "small"
    assert info["max_input_length"] == engine.max_seq_length
    assert info["max_client_batch_size"] == 2048
    (card,) = info["models"]
    assert card["parity"] == engine.manifest.parity
    assert card["weights_sha256"] == info["model_sha"] == engine.manifest.weights_sha256
    assert card["file"] == "tiny-bert.onnx"  # and no folder


def test_huggingface_hub(server: Running, engine: Engine) -> None:
    client = InferenceClient(model=server.url)
    vectors = client.feature_extraction(TEXTS, normalize=True, truncate=True, truncation_direction="right")
    np.testing.assert_allclose(vectors, unit(engine, TEXTS), atol=1e-6)
    assert client.feature_extraction(TEXTS[0]).shape == (1, 32)
    found = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    expected = engine.similarity(engine.encode(TEXTS[:1]), engine.encode(TEXTS[1:]))
    np.testing.assert_allclose(found, expected[0], atol=1e-6)
