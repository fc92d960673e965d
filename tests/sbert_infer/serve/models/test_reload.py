"""Replacing a model while it serves."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.serve.models import served_model
from sbert_infer.serve.settings import ModelFile
from tests.sbert_infer.serve.conftest import Running

KEYS, ADMIN = ("secret",), ("admin",)
AS_ADMIN = {"authorization": "Bearer admin"}


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
    server = start_server(models=(ModelFile(file, "small"),), keys=KEYS, admin_keys=ADMIN)
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
        response = server.post("/admin/reload", None, headers=AS_ADMIN)
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
    server = start_server(models=(ModelFile(file, "small"),), keys=KEYS, admin_keys=ADMIN)
    before = vector(server, "A cat sat.")
    good = file.read_bytes()
    for content in (good[:-100], b"nonsense", b"", None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        response = server.post("/admin/reload", None, headers=AS_ADMIN)
        assert response.status_code == 409
        assert "small was not reloaded, the model opened before still serves: served.onnx" in response.json()["error"]
        assert str(file.parent) not in response.text
        if content is None:
            file.touch()
        assert server.client.get("/health/ready").status_code == 200
        np.testing.assert_array_equal(vector(server, "A cat sat."), before)
    file.write_bytes(good)
    assert server.post("/admin/reload", None, headers=AS_ADMIN).status_code == 200
    metrics = server.client.get("/metrics").text
    assert 'sbert_reloads_total{model="small",result="failed"} 4.0' in metrics


def test_what_the_old_model_held_goes_back_to_the_system(
    start_server: Callable[..., Running], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(models=(ModelFile(file, "small"),), keys=KEYS, admin_keys=ADMIN)
    before, given_back = server.server.models.first.engine, threading.Event()

    def note() -> None:
        if not before.ready:
            given_back.set()

    monkeypatch.setattr(served_model, "give_back", note)
    assert server.post("/admin/reload", None, headers=AS_ADMIN).status_code == 200
    assert given_back.wait(30)


def test_a_browser_may_not_reload(start_server: Callable[..., Running], file: Path) -> None:
    """It sends Basic by itself, also for a form on another site's page."""
    server = start_server(models=(ModelFile(file, "small"),), keys=KEYS, admin_keys=ADMIN)
    response = httpx.post(f"{server.url}/admin/reload", auth=("", ADMIN[0]))
    assert response.status_code == 403
    assert "Bearer" in response.json()["error"]


def test_there_is_no_reload_without_admin_keys(server: Running) -> None:
    response = server.post("/admin/reload", None)
    assert response.status_code == 403
    assert "SIGHUP" in response.json()["error"]


# Keys and certificates ----------------------------------------------------------------------------


def status(server: Running, key: str) -> int:
    return httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


def test_a_revoked_key_ends(start_server: Callable[..., Running], tmp_path: Path) -> None:
    keys, admins = tmp_path / "keys", tmp_path / "admins"
    keys.write_text("old\nkept\n")
    admins.write_text("admin\n")
    server = start_server(api_key_file=keys, admin_key_file=admins, keys=("given",))
    assert [status(server, key) for key in ("old", "kept", "given", "new")] == [200, 200, 200, 401]
    keys.write_text("kept\nnew\n")
    assert server.post("/admin/reload", None, headers=AS_ADMIN).status_code == 200
    assert [status(server, key) for key in ("old", "kept", "given", "new")] == [401, 200, 200, 200]
    admins.write_text("successor\n")
    assert server.post("/admin/reload", None, headers=AS_ADMIN).status_code == 200
    assert server.post("/admin/reload", None, headers=AS_ADMIN).status_code == 401


def test_a_bad_file_of_keys_does_not_open_the_server(start_server: Callable[..., Running], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    server = start_server(api_key_file=keys, admin_keys=ADMIN)
    for change, message in (
        (lambda: keys.write_text("# none\n"), "keys holds no key"),
        (lambda: keys.write_bytes(b"\xff"), "keys is not UTF-8"),
        (lambda: keys.write_text("new\nadmin\n"), "both an API key and an admin key"),
        (keys.unlink, "keys: No such file"),
    ):
        change()
        response = server.post("/admin/reload", None, headers=AS_ADMIN)
        assert response.status_code == 409
        assert f"nothing was reloaded: {message}" in response.json()["error"].replace("a key is ", "")
        assert str(tmp_path) not in response.text
        assert [status(server, key) for key in ("old", "new")] == [200, 401]


def make_certificate(folder: Path, name: str) -> None:
    """Write cert.pem and key.pem for this name."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out cert.pem"
    subprocess.run([*command.split(), "-subj", f"/CN={name}"], check=True, capture_output=True, cwd=folder)


def served_certificate(server: Running) -> str:
    url = httpx.URL(server.url)
    assert url.port is not None
    return ssl.get_server_certificate((url.host, url.port), timeout=30)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_a_handshake_is_not_waited_for_as_long_as_a_body(
    start_server: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbert_infer.serve.server._HANDSHAKE_S", 0.3)
    make_certificate(tmp_path, "first")
    url = httpx.URL(start_server(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", read_timeout_s=600).url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port), timeout=60) as silent:
        assert silent.recv(1) == b""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_clients_that_connect_and_never_shake_hands_make_room_for_others(
    start_server: Callable[..., Running], tmp_path: Path
) -> None:
    make_certificate(tmp_path, "first")
    server = start_server(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", max_connections=4)
    url = httpx.URL(server.url)
    assert url.port is not None
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((url.host, url.port), timeout=5)) for _ in range(10)]
        assert served_certificate(server).split() == (tmp_path / "cert.pem").read_text().split()
        assert [one.recv(1) for one in silent[:6]] == [b""] * 6  # long before the timeout of a handshake
        silent[-1].settimeout(0.5)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_a_new_certificate_is_shown_to_new_connections(start_server: Callable[..., Running], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    make_certificate(tmp_path, "first")
    server = start_server(tls_cert=cert, tls_key=key, admin_keys=ADMIN, api_key_file=keys)

    def reload() -> int:
        with httpx.Client(verify=False, timeout=30) as client:  # noqa: S501 - which one is checked below
            return client.post(f"{server.url}/admin/reload", headers=AS_ADMIN).status_code

    def answer(api_key: str) -> int:
        with httpx.Client(verify=False, timeout=30) as client:  # noqa: S501 - as above
            return client.get(f"{server.url}/info", headers={"authorization": f"Bearer {api_key}"}).status_code

    first = served_certificate(server)
    assert first.split() == cert.read_text().split()
    make_certificate(tmp_path, "second")
    assert served_certificate(server) == first
    assert reload() == 200
    second = served_certificate(server)
    assert second.split() == cert.read_text().split()
    assert second != first
    assert (answer("old"), answer("new")) == (200, 401)
    key.write_text("no key")
    keys.write_text("new\n")
    assert reload() == 409
    assert served_certificate(server) == second
    assert (answer("old"), answer("new")) == (401, 200)  # a bad certificate keeps no revoked key
