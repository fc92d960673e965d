"""OpenAI's routes, as its clients use them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.serve.settings import ModelFile
from tests.sbert_infer.serve.conftest import Running

TEXTS = ["A cat sat.", "A feline was sitting.", "", "naïve café 🙂", "A cat sat."]
LONG = "word " * 500


@pytest.fixture(scope="module")
def engine(served_onnx: Path) -> Iterator[Engine]:
    with Engine(served_onnx, on_truncate="ignore") as engine:
        yield engine


def unit(engine: Engine, texts: list[str], **options: Any) -> Any:
    """The engine's vectors, at length 1."""
    return engine.encode(texts, normalize_embeddings=True, **options)


def vectors_in(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


def error_in(response: httpx.Response, status: int, code: str) -> Any:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


# Vectors ------------------------------------------------------------------------------------------


def test_floats_are_the_engines_vectors(server: Running, engine: Engine) -> None:
    response = server.post("/v1/embeddings", {"input": TEXTS, "model": "small", "encoding_format": "float"})
    np.testing.assert_allclose(vectors_in(response), unit(engine, TEXTS), atol=1e-6)
    answer = response.json()
    assert (answer["object"], answer["model"]) == ("list", "small")
    assert [(item["object"], item["index"]) for item in answer["data"]] == [("embedding", n) for n in range(len(TEXTS))]
    tokens = sum(map(len, engine.tokenizer(TEXTS, truncation=True)["input_ids"]))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_base64_is_the_same_float32(server: Running) -> None:
    floats = vectors_in(server.post("/v1/embeddings", {"input": TEXTS}))
    answer = server.post("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}).json()
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]
    np.testing.assert_array_equal(np.stack(decoded), floats)


def test_dimensions_are_cut_and_scaled_to_length_1(server: Running, engine: Engine) -> None:
    found = vectors_in(server.post("/v1/embeddings", {"input": TEXTS, "dimensions": 5}))
    np.testing.assert_allclose(found, unit(engine, TEXTS, truncate_dim=5), atol=1e-6)


def test_a_prompt_goes_before_each_text(server: Running, engine: Engine) -> None:
    found = vectors_in(server.post("/v1/embeddings", {"input": TEXTS, "prompt_name": "query"}))
    np.testing.assert_allclose(found, unit(engine, TEXTS, prompt_name="query"), atol=1e-6)


def test_2048_inputs_in_their_order(server: Running, engine: Engine) -> None:
    texts = [f"text {number}" * (1 + number % 3) for number in range(2048)]
    found = vectors_in(server.post("/v1/embeddings", {"input": texts, "user": "somebody"}))
    np.testing.assert_allclose(found, unit(engine, texts), atol=1e-6)


def test_lengths_are_kept_where_they_have_a_meaning(
    start_server: Callable[..., Running], make_variant: Callable[..., Path], engine: Engine
) -> None:
    server = start_server(models=(ModelFile(make_variant("dot", similarity="dot")),))
    found = vectors_in(server.post("/v1/embeddings", {"input": TEXTS}))
    assert not np.allclose(np.linalg.norm(found, axis=1), 1, atol=0.1)
    np.testing.assert_allclose(found, engine.encode(TEXTS), rtol=1e-5, atol=1e-5)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        ({}, "invalid_request", "input", "missing required field `input`"),
        ({"input": []}, "empty_input", "input", "length >= 1"),
        ({"input": ["a"] * 2049}, "too_many_inputs", "input", "length <= 2048"),
        ({"input": ["a", 3]}, "invalid_request", "input", "input[1]"),
        ({"input": ["a", None]}, "invalid_request", "input", "input[1]"),
        ({"input": "a", "encoding_format": "int4"}, "invalid_request", "encoding_format", "'int4'"),
        ({"input": "a", "dimensions": 0}, "invalid_request", "dimensions", "Expected a whole number of at least 1"),
        ({"input": "a", "dimensions": 33}, "invalid_request", "dimensions", "at most 32"),
        ({"input": "a", "dimensions": 2.5}, "invalid_request", "dimensions", "multiple of 1"),
        ({"input": "a", "prompt_name": "summary"}, "invalid_request", "prompt_name", "document, query"),
        ({"input": "a", "inputs": "b"}, "invalid_request", "inputs", "unknown field `inputs`"),
        ({"input": ["a", LONG]}, "context_length_exceeded", "input", "input 1 is longer"),
        ({"input": LONG}, "context_length_exceeded", "input", "the server's --auto-truncate"),
        ([1], "invalid_request", None, "Expected `object`"),
    ],
)
def test_it_says_what_is_wrong(server: Running, body: Any, code: str, param: str | None, message: str) -> None:
    error = error_in(server.post("/v1/embeddings", body), 400, code)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty: send JSON"),
        (b" \n", "the body is empty: send JSON"),
        (b"{", "the body is not JSON: Input data was truncated"),
        (b'{"input": "\xff"}', "the body is not JSON: "),
        (b'{"input": "\\ud800 alone"}', "a lone surrogate"),
        (b'{"input": "\\udc00 alone"}', "a lone surrogate"),
        (b'{"input": "\\ud83d\\ude42"', "the body is not JSON: Input data was truncated"),
        (b'{"input": "\\\\ud800"', "the body is not JSON: Input data was truncated"),
    ],
)
def test_what_is_not_json(server: Running, content: bytes, message: str) -> None:
    response = server.client.post("/v1/embeddings", content=content, headers={"content-type": "application/json"})
    assert message in error_in(response, 400, "invalid_json")["message"]


def test_deep_nesting_is_just_wrong(server: Running) -> None:
    content = b'{"input": ' + b"[" * 100_000
    response = server.client.post("/v1/embeddings", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]]])
def test_token_ids_are_refused_with_what_to_change(server: Running, ids: Any) -> None:
    error = error_in(server.post("/v1/embeddings", {"input": ids}), 400, "token_ids_refused")
    assert "check_embedding_ctx_length=False" in error["message"]
    assert "--allow-token-ids" in error["message"]


def test_long_texts_are_cut_if_the_server_says_so(start_server: Callable[..., Running], engine: Engine) -> None:
    server = start_server(auto_truncate=True)
    response = server.post("/v1/embeddings", {"input": ["a", LONG, LONG + "more"]})
    np.testing.assert_allclose(vectors_in(response), unit(engine, ["a", LONG, LONG + "more"]), atol=1e-6)
    assert response.headers["x-truncated-texts"] == "2"
    assert "x-truncated-texts" not in server.post("/v1/embeddings", {"input": "a"}).headers


# Models -------------------------------------------------------------------------------------------


def test_a_model_that_is_not_served(server: Running) -> None:
    error = error_in(server.post("/v1/embeddings", {"input": "a", "model": "ada"}), 404, "model_not_found")
    assert error["message"].startswith("model 'ada' is not served here, only: small")


def test_several_models_are_told_apart_by_name(
    start_server: Callable[..., Running], served_onnx: Path, make_variant: Callable[..., Path]
) -> None:
    other = make_variant("other", default_prompt_name="query")
    server = start_server(models=(ModelFile(served_onnx, "one"), ModelFile(other, "two")))
    assert [model["id"] for model in server.client.get("/v1/models").json()["data"]] == ["one", "two"]
    for name, path in (("one", served_onnx), ("two", other)):
        with Engine(path) as engine:
            found = vectors_in(server.post("/v1/embeddings", {"input": TEXTS, "model": name}))
            np.testing.assert_allclose(found, unit(engine, TEXTS), atol=1e-6)
        assert server.client.get(f"/v1/models/{name}").json()["id"] == name
    assert (
        "name one of: one, two"
        in error_in(server.post("/v1/embeddings", {"input": "a"}), 400, "invalid_request")["message"]
    )
    assert error_in(server.client.get("/v1/models/org/three"), 404, "model_not_found")
    assert np.shape(server.post("/embed", {"inputs": "a"}).json()) == (1, 32)


def test_any_name_if_the_server_says_so(start_server: Callable[..., Running]) -> None:
    server = start_server(any_model_name=True)
    response = server.post("/v1/embeddings", {"input": "a", "model": "text-embedding-3-small"})
    assert vectors_in(response).shape == (1, 32)
    assert response.json()["model"] == "small"


def test_a_model_also_has_the_name_it_was_exported_with(server: Running, engine: Engine) -> None:
    names = [model["id"] for model in server.client.get("/v1/models").json()["data"]]
    assert names == ["small", engine.manifest.name]
    assert server.post("/v1/embeddings", {"input": "a", "model": names[1]}).json()["model"] == "small"


def test_two_models_of_one_name_are_refused(start_server: Callable[..., Running], served_onnx: Path) -> None:
    with pytest.raises(ValueError, match=r"2 models are called tiny-bert: give them names, as in first="):
        start_server(models=(ModelFile(served_onnx), ModelFile(served_onnx)))
