"""/rerank and /predict with a real reranker, and all routes with the wrong kind of model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from sbert_infer import Reranker
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import append_metadata
from sbert_infer.serve.settings import ModelFile, Settings
from tests.sbert_infer.serve.conftest import Running, start

QUERY = "Who sat?"
TEXTS = ["A cat sat.", "Rain fell on the tin roof.", "", "naïve café 🙂", "A cat sat."]
LONG = "word " * 500


@pytest.fixture(scope="module")
def classifier_onnx(reranker_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with three labels: its last layer three times, with another bias each."""
    artifact = open_artifact(reranker_onnx)
    model = onnx.load(reranker_onnx)
    del model.metadata_props[:]
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if tensor.name.endswith("classifier.weight"):
            array = np.repeat(array, 3, axis=array.shape.index(1))
        elif tensor.name.endswith("classifier.bias"):
            array = array + np.array([0.5, -1, 2], np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 3
    del model.graph.value_info[:]
    target = tmp_path_factory.mktemp("classifier") / "classifier.onnx"
    with target.open("w+b") as file:
        file.write(model.SerializeToString())
        manifest = replace(
            artifact.manifest, dim=3, labels=("no", "maybe", "yes"), activation="identity", canaries=None
        )
        append_metadata(file, manifest, artifact.tokenizer_json)
    return target


@pytest.fixture(scope="module")
def server(reranker_onnx: Path, classifier_onnx: Path, served_onnx: Path) -> Iterator[Running]:
    """A sentence encoder, a reranker and a classifier, in this order."""
    files = {"encoder": served_onnx, "reranker": reranker_onnx, "classifier": classifier_onnx}
    models = tuple(ModelFile(path, name) for name, path in files.items())
    running = start(Settings(models, port=0, drain_s=5.0))
    yield running
    running.stop()


def post(server: Running, path: str, body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("raw", "activation"), [(True, "identity"), (False, "sigmoid")])
def test_rerank(server: Running, reranker_onnx: Path, raw: bool, activation: str) -> None:
    with Reranker(reranker_onnx) as reranker:
        expected = reranker.rank(QUERY, TEXTS, activation_fn=activation)
    for path in ("/rerank", "/"):
        found = post(server, path, {"query": QUERY, "texts": TEXTS, "raw_scores": raw})
        assert [item["index"] for item in found] == [item["corpus_id"] for item in expected]
        np.testing.assert_allclose(
            [item["score"] for item in found], [item["score"] for item in expected], rtol=0, atol=1e-5
        )
        assert all(item.keys() == {"index", "score"} for item in found)


def test_rerank_can_return_the_texts_and_says_what_it_cut(server: Running) -> None:
    texts = [*TEXTS, LONG]
    body = {"query": QUERY, "texts": texts, "return_text": True, "truncate": True, "model": "reranker"}
    response = server.post("/rerank", body)
    assert all(item["text"] == texts[item["index"]] for item in response.json())
    assert response.headers["x-truncated-texts"] == "1"


@pytest.mark.parametrize("raw", [True, False])
def test_predict(server: Running, classifier_onnx: Path, raw: bool) -> None:
    pairs = [[QUERY, text] for text in TEXTS]
    with Reranker(classifier_onnx) as classifier:
        expected = classifier.predict(pairs, apply_softmax=not raw)
        labels = np.array(classifier.labels)
    found = post(server, "/predict", {"inputs": pairs, "raw_scores": raw, "model": "classifier"})
    for items, scores in zip(found, expected, strict=True):
        order = np.argsort(-scores)
        assert [item["label"] for item in items] == labels[order].tolist()
        np.testing.assert_allclose([item["score"] for item in items], scores[order], rtol=0, atol=1e-5)
    alone = post(server, "/predict", {"inputs": pairs[0], "raw_scores": raw, "model": "classifier"})
    assert [item["label"] for item in alone] == [item["label"] for item in found[0]]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (
            "/rerank",
            {"query": QUERY, "texts": TEXTS, "model": "encoder"},
            404,
            "encoder is a sentence encoder: use",
        ),
        ("/predict", {"inputs": [QUERY, "a"], "model": "encoder"}, 404, "encoder is a sentence encoder"),
        ("/rerank", {"query": QUERY, "texts": TEXTS, "model": "classifier"}, 404, "has 3 labels: use /predict"),
        ("/embed", {"inputs": TEXTS[0], "model": "reranker"}, 404, "reranker is a reranker: use /rerank or /predict"),
        ("/v1/embeddings", {"input": TEXTS[0], "model": "reranker"}, 404, "reranker is a reranker"),
        ("/rerank", {"query": QUERY, "texts": []}, 400, "length >= 1"),
        (
            "/rerank",
            {"query": QUERY, "texts": [QUERY, LONG], "truncate": False},
            413,
            "input 1 is longer than the model's limit",
        ),
        ("/rerank", {"query": QUERY, "texts": [1]}, 422, "texts"),
        ("/rerank", {"query": QUERY, "texts": TEXTS, "truncation_direction": "up"}, 422, "truncation_direction"),
        ("/predict", {"inputs": [[QUERY, "a"], [QUERY]]}, 422, "Expected `array` of length 2 - at `inputs[1]`"),
        ("/predict", {"inputs": [QUERY, "a", "b"]}, 422, "send one pair of texts, or a list of pairs"),
        ("/predict", {"inputs": [QUERY, [QUERY, "a"]]}, 422, "send one pair of texts, or a list of pairs"),
    ],
)
def test_what_is_refused(server: Running, path: str, body: Any, status: int, message: str) -> None:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    assert message in response.text
    if path.startswith("/v1"):
        assert response.json()["error"]["code"] == "not_supported"
    else:
        assert response.json().keys() == {"error", "error_type"}


def test_routes_without_a_model_take_the_first_of_their_kind(server: Running) -> None:
    assert len(post(server, "/embed", {"inputs": TEXTS[0]})[0]) == 32
    assert post(server, "/predict", {"inputs": [QUERY, TEXTS[0]]})[0]["label"] == "LABEL_0"
    described = server.client.get("/openapi.json").json()["paths"]
    assert {"/rerank", "/predict"} <= described.keys()
    kinds = {card["name"]: card["kind"] for card in server.client.get("/info").json()["models"]}
    assert kinds == {"encoder": "encoder", "reranker": "reranker", "classifier": "reranker"}
