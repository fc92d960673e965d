"""What other servers add to OpenAI's request, and Cohere's and Ollama's own, by hand."""

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
from sbert_infer.serve.wire.vectors import convert
from tests.sbert_infer.serve.conftest import Running

TEXTS = ["A cat sat.", "A feline was sitting.", "", "naïve café 🙂"]
LONG = "the beginning " + "word " * 500 + "and the end"


@pytest.fixture(scope="module")
def engine(served_onnx: Path) -> Iterator[Engine]:
    with Engine(served_onnx, on_truncate="ignore") as engine:
        yield engine


def embed(server: Running, texts: Any = TEXTS, **fields: Any) -> httpx.Response:
    return server.post("/v1/embeddings", {"input": texts, **fields})


def vectors_in(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]])


# Prompts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "prompt_name"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_query"}, "query"),
        ({"task": "retrieval.query"}, "query"),
        ({"model": "small-query"}, "query"),
        ({"model": "small-query", "input_type": "query"}, "query"),
        ({"input_type": "passage"}, "document"),
        ({"input_type": "search_document", "task": "retrieval.passage"}, "document"),
        ({"model": "small-passage"}, "document"),
        ({"input_type": "document", "prompt_name": "document"}, "document"),
        ({"input_type": "classification"}, None),
        ({"task": "text-matching"}, None),
        ({"input_type": None}, None),
    ],
)
def test_what_the_texts_are_chooses_the_prompt(
    server: Running, engine: Engine, fields: dict[str, Any], prompt_name: str | None
) -> None:
    expected = engine.encode(TEXTS, prompt_name=prompt_name, normalize_embeddings=True)
    np.testing.assert_allclose(vectors_in(embed(server, **fields)), expected, atol=1e-6)


def test_models_have_other_prompts_or_none(
    start_server: Callable[..., Running], make_variant: Callable[..., Path], engine: Engine
) -> None:
    prompts = {"corpus": "from a corpus: ", "clustering": "of a group: "}
    files = (ModelFile(make_variant("none", prompts={})), ModelFile(make_variant("other", prompts=prompts)))
    server = start_server(models=files)
    for model, input_type, prompt in (
        ("none", "query", ""),
        ("none", "passage", ""),
        ("other", "query", ""),
        ("other", "document", prompts["corpus"]),
        ("other", "clustering", prompts["clustering"]),
    ):
        expected = engine.encode(TEXTS, prompt=prompt, normalize_embeddings=True)
        found = vectors_in(embed(server, model=model, input_type=input_type))
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=f"{model} {input_type}")


@pytest.mark.parametrize("fields", [{"modality": "text"}, {"late_chunking": False}, {"priority": 0}], ids=str)
def test_fields_that_ask_for_what_is_done_anyway(server: Running, engine: Engine, fields: dict[str, Any]) -> None:
    expected = engine.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(vectors_in(embed(server, **fields)), expected, atol=1e-6)


# Types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["encoding_format", "embedding_type", "output_dtype"])
@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
def test_types(server: Running, engine: Engine, field: str, kind: Any) -> None:
    expected = convert(engine.encode(TEXTS, normalize_embeddings=True), kind).astype(int)
    assert np.abs(vectors_in(embed(server, **{field: kind})) - expected).max() <= 1


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("int8", np.int8), ("uint8", np.uint8), ("binary", np.int8), ("ubinary", np.uint8), ("float", "<f4")],
)
def test_base64_of_each_type(server: Running, kind: str, dtype: Any) -> None:
    plain = vectors_in(embed(server, embedding_type=kind))
    packed = embed(server, embedding_type=kind, encoding_format="base64").json()["data"]
    found = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype) for item in packed])
    np.testing.assert_array_equal(found, plain.astype(dtype))
    assert embed(server, embedding_type="base64").json() == embed(server, encoding_format="base64").json()


def test_lengths_without_a_range_are_not_squeezed_into_bytes(
    start_server: Callable[..., Running], make_variant: Callable[..., Path]
) -> None:
    server = start_server(models=(ModelFile(make_variant("dot", similarity="dot")),))
    response = embed(server, encoding_format="int8")
    assert response.status_code == 400
    assert "int8 needs vectors of length 1" in response.json()["error"]["message"]
    for fields in ({"normalized": True}, {"dimensions": 8}):
        assert embed(server, encoding_format="int8", **fields).status_code == 200
    assert embed(server, encoding_format="binary").status_code == 200
    refused = server.post("/v2/embed", {"texts": TEXTS, "embedding_types": ["float", "uint8"]})
    assert "uint8 needs vectors of length 1" in refused.json()["message"]


def test_texts_may_be_objects(server: Running) -> None:
    objects = [{"text": TEXTS[0]}, *TEXTS[1:]]
    np.testing.assert_array_equal(vectors_in(embed(server, objects)), vectors_in(embed(server)))
    for wrong in ({"image": "a.png"}, {"text": "a", "image": "a.png"}):
        assert "unknown field `image`" in embed(server, [wrong]).json()["error"]["message"]


# Long texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"truncate": "END"}, {"truncate": True}, {"truncation": True}, {"truncate_prompt_tokens": -1}],
    ids=lambda fields: "=".join(map(str, *fields.items())),
)
def test_long_texts_are_cut_if_asked(server: Running, engine: Engine, fields: dict[str, Any]) -> None:
    response = embed(server, LONG, **fields)
    np.testing.assert_allclose(vectors_in(response)[0], engine.encode(LONG, normalize_embeddings=True), atol=1e-6)
    assert response.headers["x-truncated-texts"] == "1"


def test_the_side_can_be_named(server: Running) -> None:
    start = vectors_in(embed(server, LONG, truncate="START"))
    end = vectors_in(embed(server, LONG, truncate="END"))
    assert np.abs(start - end).max() > 0.01
    side = vectors_in(embed(server, LONG, truncate_prompt_tokens=64, truncation_side="left"))
    np.testing.assert_array_equal(side, start)


@pytest.mark.parametrize("fields", [{}, {"truncate": "NONE"}, {"truncate": False}, {"truncation": False}])
def test_long_texts_are_refused_otherwise(server: Running, fields: dict[str, Any]) -> None:
    response = embed(server, LONG, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_the_server_may_decide(start_server: Callable[..., Running]) -> None:
    strict = start_server(auto_truncate=False)
    for path, body in (
        ("/embed", {"inputs": LONG}),
        ("/v2/embed", {"texts": [LONG]}),
        ("/api/embed", {"model": "small", "input": LONG}),
        ("/v1/embeddings", {"input": LONG}),
    ):
        assert "input 0 is longer" in strict.post(path, body).text, path
    assert strict.post("/embed", {"inputs": LONG, "truncate": True}).status_code == 200
    assert not strict.client.get("/info").json()["auto_truncate"]


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input_type": "poem"}, "input_type", "input_type 'poem' is unknown, use one of: query, search_query"),
        ({"task": ""}, "task", "task '' is unknown"),
        ({"input_type": "query", "task": "retrieval.passage"}, "task", "input_type and task contradict each other"),
        ({"prompt_name": "query", "input_type": "passage"}, "input_type", "prompt_name and input_type contradict"),
        ({"model": "small-query", "input_type": "passage"}, "model", "input_type and model contradict each other"),
        ({"model": "other-query"}, "model", "model 'other-query' is not served here"),
        ({"model": "small-poem"}, "model", "model 'small-poem' is not served here"),
        ({"embedding_type": "int8", "output_dtype": "binary"}, "output_dtype", "contradict each other"),
        ({"dimensions": 8, "output_dimension": 16}, "output_dimension", "contradict each other"),
        ({"output_dimension": 33}, "dimensions", "at most 32"),
        ({"truncate": "MIDDLE"}, "truncate", "MIDDLE"),
        ({"late_chunking": True}, "late_chunking", "not supported here"),
        ({"modality": "image"}, "modality", "image"),
        ({"priority": "high"}, "priority", "Expected"),
        ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens", "must be -1, or at least the 64 tokens"),
    ],
)
def test_it_says_what_is_wrong(server: Running, fields: dict[str, Any], param: str, message: str) -> None:
    response = embed(server, **fields)
    assert response.status_code == (404 if "is not served" in message else 400), response.text
    answer = response.json()
    assert answer["error"]["param"] == param
    assert message in answer["error"]["message"]
    assert answer["detail"] == answer["error"]["message"]


# Cohere, Ollama, Azure ----------------------------------------------------------------------------


def test_cohere(server: Running, engine: Engine) -> None:
    body = {"texts": TEXTS, "input_type": "search_document", "model": "small"}
    expected = engine.encode_document(TEXTS, normalize_embeddings=True)
    answer = server.post("/v2/embed", {**body, "embedding_types": ["float", "ubinary"]}).json()
    assert answer["embeddings"].keys() == {"float", "ubinary"}
    np.testing.assert_allclose(answer["embeddings"]["float"], expected, atol=1e-6)
    assert answer["texts"] == TEXTS
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    older = server.post("/v1/embed", body).json()
    assert older["response_type"] == "embeddings_floats"
    np.testing.assert_allclose(older["embeddings"], expected, atol=1e-6)
    assert server.post("/v2/embed", {"texts": [LONG]}).headers["x-truncated-texts"] == "1"
    wrong = server.post("/v2/embed", {**body, "input_type": "image"})
    assert (wrong.status_code, wrong.json().keys()) == (400, {"message"})


def test_ollama(server: Running, engine: Engine) -> None:
    answer = server.post("/api/embed", {"model": "small:latest", "input": TEXTS, "unknown": 1}).json()
    np.testing.assert_allclose(answer["embeddings"], engine.encode(TEXTS, normalize_embeddings=True), atol=1e-6)
    assert (answer["model"], answer["total_duration"] > 0) == ("small:latest", True)
    older = server.post("/api/embeddings", {"model": "small", "prompt": TEXTS[0]}).json()
    np.testing.assert_allclose(older["embedding"], engine.encode(TEXTS[0]), rtol=1e-5, atol=1e-5)
    unknown = server.post("/api/embed", {"model": "other", "input": TEXTS})
    assert unknown.status_code == 404
    assert unknown.json()["error"].startswith("model 'other' is not served here")


def test_azures_path_names_the_model(server: Running) -> None:
    body = {"input": TEXTS, "model": "whatever"}
    response = server.post("/openai/deployments/small/embeddings?api-version=2024-10-21", body)
    assert response.json() == embed(server).json()
    wrong = server.post("/openai/deployments/other/embeddings", body)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
    json_type = {"content-type": "application/json"}
    broken = server.client.post("/openai/deployments/small/embeddings", content=b"{", headers=json_type)
    assert broken.json()["error"]["code"] == "invalid_json"
