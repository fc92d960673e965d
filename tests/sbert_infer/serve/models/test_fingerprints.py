"""Fingerprints of served models: shown, expected, and the cache that depends on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import ArtifactError
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.serve.settings import ModelFile, expecting
from tests.sbert_infer.serve.conftest import Running
from tests.sbert_infer.serve.test_metrics import of, scrape

ADMIN = ("admin",)
AS_ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture
def file(served_onnx: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(served_onnx, tmp_path / "served.onnx"))


def test_responses_and_descriptions_have_it(server: Running, served_onnx: Path) -> None:
    found = fingerprint(open_artifact(served_onnx))
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/embed", {"inputs": ["a", "b"]}),
        ("/v2/embed", {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]}),
        ("/api/embed", {"model": "small", "input": "a"}),
    ):
        assert server.post(path, body).headers["x-model-fingerprint"] == found.exact
    assert "x-model-fingerprint" not in server.client.get("/health").headers
    assert server.client.get("/v1/models/small").json()["fingerprint"] == found.exact
    card = server.client.get("/info").json()["models"][0]
    assert (card["fingerprint"], card["model_fingerprint"]) == (found.exact, found.model)
    assert card["fingerprint_parts"] == dict(found.parts)


def test_a_wrong_file_never_serves(
    start_server: Callable[..., Running], file: Path, make_variant: Callable[..., Path]
) -> None:
    own, other = (fingerprint(open_artifact(path)) for path in (file, make_variant("other", prompts={})))
    for wrong in (other.exact, other.model[:8]):
        with pytest.raises(ArtifactError, match=f"{own.exact} .* but {wrong} is expected"):
            start_server(models=expecting([ModelFile(file, "small")], [wrong]))
    for right in (own.exact, own.exact[:8], own.model[:10].upper()):
        start_server(models=expecting([ModelFile(file, "small")], [f"small={right}"])).stop()


def test_after_a_reload_of_a_wrong_file_the_old_model_serves(
    start_server: Callable[..., Running], file: Path, make_variant: Callable[..., Path]
) -> None:
    own = fingerprint(open_artifact(file))
    server = start_server(models=expecting([ModelFile(file, "small")], [own.exact]), admin_keys=ADMIN)
    other = make_variant("other", prompts={})
    shutil.copy(other, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)
    response = server.post("/admin/reload", None, headers=AS_ADMIN)
    assert response.status_code == 409
    for named in (own.exact, fingerprint(open_artifact(other)).exact, "still serves"):
        assert named in response.json()["error"]
    assert server.post("/embed", {"inputs": "a"}).headers["x-model-fingerprint"] == own.exact


def test_the_cache_lasts_until_another_model_is_loaded(
    start_server: Callable[..., Running], file: Path, make_variant: Callable[..., Path]
) -> None:
    server = start_server(models=(ModelFile(file, "small"),), admin_keys=ADMIN, cache_mb=1)

    def ask() -> tuple[Any, float, float]:
        vectors = server.post("/embed", {"inputs": ["A cat sat.", "A dog lay."]}).json()
        found = scrape(server)
        return vectors, *(of(found, f"sbert_cache_{name}_total", model="small") for name in ("hits", "misses"))

    first, *counts = ask()
    assert counts == [0, 2]
    assert ask() == (first, 2, 2)
    assert of(scrape(server), "sbert_cache_bytes", model="small") > 2 * 32 * 4
    assert server.post("/admin/reload", None, headers=AS_ADMIN).status_code == 200
    assert ask() == (first, 4, 2)
    other = make_variant("other", default_prompt_name="query")
    shutil.copy(other, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)
    assert server.post("/admin/reload", None, headers=AS_ADMIN).status_code == 200
    vectors, *counts = ask()
    assert counts == [4, 4]
    assert vectors != first


def test_there_is_no_cache_unless_asked_for(server: Running) -> None:
    assert "sbert_cache" not in server.client.get("/metrics").text
