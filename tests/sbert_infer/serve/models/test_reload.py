"""Replacing a model while it serves."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.serve.settings import ModelFile
from tests.sbert_infer.serve.conftest import Running

KEYS = ("secret",)


@pytest.fixture
def file(served_onnx: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(served_onnx, tmp_path / "served.onnx"))


def vector(server: Running, text: str) -> Any:
    response = server.post("/embed", {"inputs": text})
    assert response.status_code == 200, response.text
    return np.array(response.json()[0], np.float32)


def unit(path: Path, text: str) -> Any:
    with Engine(path) as engine:
        return engine.encode(text, normalize_embeddings=True)


def test_a_new_model_takes_over_and_no_request_is_lost(
    start_server: Callable[..., Running], file: Path, make_variant: Callable[..., Path]
) -> None:
    server = start_server(models=(ModelFile(file, "small"),), keys=KEYS)
    new = make_variant("new", default_prompt_name="query")
    either = [unit(file, "A cat sat."), unit(new, "A cat sat.")]
    assert np.abs(either[0] - either[1]).max() > 1e-3
    stop, bad, count = threading.Event(), [], [0] * 6

    def ask(number: int) -> None:
        with httpx.Client(base_url=server.url, headers={"authorization": "Bearer secret"}) as client:
            while not stop.is_set():
                response = client.post("/embed", json={"inputs": "A cat sat."})
                count[number] += 1
                if response.status_code != 200 or not any(
                    np.allclose(response.json()[0], expected, atol=1e-6) for expected in either
                ):
                    bad.append(response.text[:200])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for source in (new, file, new):
        time.sleep(0.1)
        source_bytes = source.read_bytes()
        file.with_suffix(".tmp").write_bytes(source_bytes)
        if source is not file:
            file.with_suffix(".tmp").replace(file)
        response = server.post("/admin/reload", None)
        assert response.status_code == 200, response.text
    stop.set()
    for thread in threads:
        thread.join()
    assert bad == []
    assert min(count) > 0
    assert response.json()["models"][0]["name"] == "small"
    np.testing.assert_allclose(vector(server, "A cat sat."), either[1], atol=1e-6)
    metrics = server.client.get("/metrics").text
    assert 'sbert_reloads_total{model="small",result="ok"} 3.0' in metrics
    assert f'sbert_requests_total{{model="small"}} {sum(count) + 1}.0' in metrics  # closed engines included


def test_a_bad_file_changes_nothing(start_server: Callable[..., Running], file: Path) -> None:
    server = start_server(models=(ModelFile(file, "small"),), keys=KEYS)
    before = vector(server, "A cat sat.")
    good = file.read_bytes()
    for content in (good[:-100], b"nonsense", b"", None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        response = server.post("/admin/reload", None)
        assert response.status_code == 409
        assert "small was not reloaded, the model opened before still serves: served.onnx" in response.json()["error"]
        assert str(file.parent) not in response.text
        if content is None:
            file.touch()
        assert server.client.get("/health/ready").status_code == 200
        np.testing.assert_array_equal(vector(server, "A cat sat."), before)
    file.write_bytes(good)
    assert server.post("/admin/reload", None).status_code == 200
    metrics = server.client.get("/metrics").text
    assert 'sbert_reloads_total{model="small",result="failed"} 4.0' in metrics


def test_a_browser_may_not_reload(start_server: Callable[..., Running], file: Path) -> None:
    """It sends Basic by itself, also for a form on another site's page."""
    server = start_server(models=(ModelFile(file, "small"),), keys=KEYS)
    response = httpx.post(f"{server.url}/admin/reload", auth=("", KEYS[0]))
    assert response.status_code == 403
    assert "Bearer" in response.json()["error"]


def test_there_is_no_reload_without_keys(server: Running) -> None:
    response = server.post("/admin/reload", None)
    assert response.status_code == 403
    assert "SIGHUP" in response.json()["error"]
