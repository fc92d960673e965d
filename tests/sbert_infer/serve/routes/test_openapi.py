"""The server does what its description says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sbert_infer.serve import app
from sbert_infer.serve.settings import ModelFile
from tests.sbert_infer.serve.conftest import Running

# What a schema does not say: that fields may not contradict each other, lists must make pairs, and
# numbers be ids of tokens.
UNSAID = """
[[operations]]
include-path-regex = "/score$|/decode$|^(/v1|/openai.*)?/embeddings$"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "422"]
"""


def test_schemathesis_finds_nothing(start_server: Callable[..., Running], tmp_path: Path) -> None:
    server = start_server(keys=("secret",), auto_truncate=True)
    (tmp_path / "schemathesis.toml").write_text(UNSAID)
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json"]
    command += ["--max-examples", "5", "--seed", "1", "--no-color", "--generation-database", "none"]
    command += ["--suppress-health-check", "all", "-H", "Authorization: Bearer secret"]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Tested: 28" in done.stdout


def test_the_description_knows_the_models(server: Running) -> None:
    description = server.client.get("/openapi.json").json()
    request = description["components"]["schemas"]["EmbeddingRequest"]["properties"]
    assert request["prompt_name"]["enum"] == ["document", "query", None]
    assert request["model"]["enum"][0] == "small"
    assert request["dimensions"]["anyOf"][0]["maximum"] == 32
    assert "security" not in str(description)


def test_the_description_is_made_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first = server.client.get("/openapi.json").json()
    monkeypatch.setattr(app, "describe", None)  # to call it would fail
    assert server.client.get("/openapi.json").json() == first


def test_the_description_follows_a_reload(
    start_server: Callable[..., Running], make_variant: Callable[..., Path]
) -> None:
    file = make_variant("changing")
    server = start_server(models=(ModelFile(file),), admin_keys=("admin",))
    before = server.client.get("/openapi.json").text
    make_variant("new", prompts={"poem": "a poem: "}).replace(file)
    assert server.post("/admin/reload", None, headers={"authorization": "Bearer admin"}).status_code == 200
    assert '"poem"' not in before
    assert '"poem"' in server.client.get("/openapi.json").text


def test_every_example_works(server: Running) -> None:
    for path, methods in server.client.get("/openapi.json").json()["paths"].items():
        for operation in methods.values():
            example = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
            if example is not None and path != "/embed_all":
                response = server.post(path.replace("{name}", "small"), example)
                assert response.status_code == 200, response.text


def test_methods_that_a_path_does_not_have(server: Running) -> None:
    response = server.client.delete("/v1/embeddings")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert set(server.client.put("/").headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
