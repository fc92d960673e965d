"""Keys are needed on every route but the probes."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.serve.http.auth import OPEN_PATHS, Access, Keys, read_keys
from sbert_infer.serve.settings import ModelFile, Settings
from tests.sbert_infer.serve.conftest import Running, start

KEYS = ("first-key", "zweiter Schlüssel")


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


def test_every_route_but_the_probes_needs_a_key(start_server: Callable[..., Running]) -> None:
    server = start_server(keys=KEYS)
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/", "/docs", "/metrics", "/openapi.json", "/v1/embeddings", "/embed", "/admin/reload"} <= set(paths)
    with httpx.Client(base_url=server.url) as stranger:
        for path, methods in {**paths, "/nowhere": {"get": {}, "post": {}, "put": {}}}.items():
            for method in methods:
                response = stranger.request(method, path.replace("{name}", "small"), content=b"{}")
                assert response.status_code == (200 if path in OPEN_PATHS else 401), f"{method} {path}"
                if path not in OPEN_PATHS:
                    challenge = response.headers["www-authenticate"]
                    assert "Bearer" in challenge
                    assert "Basic" in challenge
                    assert "small" not in response.text
    assert set(paths) >= OPEN_PATHS


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer first-key", 200),
        (basic("first-key"), 200),
        (basic("zweiter Schlüssel"), 200),
        ("Bearer first-ke", 401),
        ("Bearer first-key2", 401),
        ("Bearer", 401),
        ("first-key", 401),
        (basic(""), 401),
        ("Basic !!!", 401),
        ("Basic /w==", 401),
    ],
)
def test_what_opens(server_with_keys: Running, authorization: str, status: int) -> None:
    with httpx.Client(base_url=server_with_keys.url) as client:
        assert client.get("/v1/models", headers={"authorization": authorization}).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"api-key": "first-key"}, 200),
        ({"Api-Key": "first-key"}, 200),
        ({"api-key": "first-ke"}, 401),
        ({"api-key": ""}, 401),
        ({"api-key": "Bearer first-key"}, 401),
        ({"authorization": "Bearer wrong", "api-key": "first-key"}, 401),
        ({"authorization": "Bearer first-key", "api-key": "wrong"}, 200),
    ],
)
def test_azures_header_opens_too(server_with_keys: Running, headers: dict[str, str], status: int) -> None:
    with httpx.Client(base_url=server_with_keys.url) as client:
        assert client.get("/v1/models", headers=headers).status_code == status


@pytest.fixture(scope="module")
def server_with_keys(served_onnx: Path) -> object:
    running = start(Settings((ModelFile(served_onnx, "small"),), port=0, keys=KEYS))
    yield running
    running.stop()


def test_an_error_of_openai_is_in_its_own_form(server_with_keys: Running) -> None:
    response = httpx.post(f"{server_with_keys.url}/v1/embeddings", json={"input": "a"})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_refused_upload_still_gets_its_response(server_with_keys: Running) -> None:
    response = httpx.post(f"{server_with_keys.url}/embed", content=b" " * 8_000_000)
    assert response.status_code == 401


@given(st.text(), st.lists(st.text(min_size=1), min_size=1))
def test_only_equal_keys_open(given_key: str, keys: list[str]) -> None:
    key = given_key.encode().strip()
    latin = {own.encode("latin-1") for own in keys if max(own) <= "\u00ff"}
    spelled = {own.encode() for own in keys} | latin
    assert (Keys(keys).find(b"Bearer " + given_key.encode()) is not None) == (key in spelled)


@pytest.mark.parametrize("code", ["utf-8", "latin-1"])
def test_a_key_may_have_any_letters(code: str) -> None:
    guard = Keys(["schl\u00fcssel"])
    password = base64.b64encode("user:schl\u00fcssel".encode(code))
    assert guard.find("Bearer schl\u00fcssel".encode(code))
    assert guard.find(b"Basic " + password)
    assert not guard.find(b"Bearer schlussel")


def test_what_is_no_base64_is_no_key(server_with_keys: Running) -> None:
    response = httpx.get(f"{server_with_keys.url}/info", headers=[(b"authorization", b"Basic \xc3\xa9")])
    assert response.status_code == 401


def test_a_browsers_preflight_needs_no_key(start_server: Callable[..., Running]) -> None:
    server = start_server(keys=KEYS, cors_origins=("https://page.example",))
    asked = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    with httpx.Client(base_url=server.url) as browser:
        allowed = browser.options("/v1/embeddings", headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        assert browser.options("/v1/embeddings", headers={**asked, "origin": "https://evil.example"}).status_code == 400
        refused = browser.post("/v1/embeddings", json={"input": "a"}, headers={"origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"  # or the page could not read it
    answer = server.post("/v1/embeddings", {"input": "a"}, headers={"origin": "https://page.example"})
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_without_origins_no_page_may_ask(server: Running) -> None:
    response = server.post("/v1/embeddings", {"input": "a"}, headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in response.headers


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeff# ours\n  one \n\ntwo\n", encoding="utf-8")
    assert read_keys(file) == ["one", "two"]
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_keys(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_keys(file)


# Admins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "authorization", "status", "message"),
    [
        (KEYS, "Bearer admin-key", 200, ""),
        (KEYS, "Bearer first-key", 403, "that is an API key"),
        (KEYS, basic("admin-key"), 403, "Bearer"),
        (KEYS, "Bearer other", 401, "no valid admin key"),
        ((), "Bearer admin-key", 200, ""),
        ((), "", 401, "no valid admin key"),
    ],
)
def test_reload_needs_an_admin_key(
    start_server: Callable[..., Running], keys: tuple[str, ...], authorization: str, status: int, message: str
) -> None:
    server = start_server(keys=keys, admin_keys=("admin-key",))
    response = httpx.post(f"{server.url}/admin/reload", headers={"authorization": authorization}, timeout=30)
    assert response.status_code == status
    assert message in response.text


def test_an_admin_key_opens_nothing_else_and_is_no_api_key(start_server: Callable[..., Running]) -> None:
    server = start_server(keys=KEYS, admin_keys=("admin-key",))
    assert httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer admin-key"}).status_code == 401
    with pytest.raises(ValueError, match="both an API key and an admin key"):
        Access(Settings((), keys=KEYS, admin_keys=KEYS[1:]))


# Hosts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bound(served_onnx: Path) -> object:
    hosts = ("Here.example", "*.inside.example", "[::1]")
    running = start(Settings((ModelFile(served_onnx, "small"),), port=0, allowed_hosts=hosts))
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("here.example", 200),
        ("HERE.example:8080", 200),
        ("here.example.", 200),
        ("a.inside.example", 200),
        ("a.b.inside.example:1", 200),
        ("[::1]:80", 200),
        ("inside.example", 421),
        ("evil-inside.example", 421),
        ("here.example.evil.example", 421),
        ("127.0.0.1", 421),
        ("", 421),
    ],
)
def test_only_its_own_names_are_answered(bound: Running, host: str, status: int) -> None:
    response = httpx.get(f"{bound.url}/v1/models", headers={"host": host})
    assert response.status_code == status
    assert httpx.get(f"{bound.url}/health/ready", headers={"host": host}).status_code == 200  # probes ask by address
    if status != 200:
        assert response.json()["error"]["code"] == "host_not_allowed"


# Metrics ------------------------------------------------------------------------------------------


def test_metrics_on_a_port_of_their_own(start_server: Callable[..., Running], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        server = start_server(keys=KEYS, metrics_port=0, allowed_hosts=("here.example",))
    (line,) = [line for line in caplog.messages if line.startswith("metrics and probes, for anyone, on ")]
    with httpx.Client(base_url=line.rpartition(" ")[2]) as scraper:
        assert "sbert_ready" in scraper.get("/metrics").text
        assert scraper.get("/health/ready").status_code == 200
        for path in ("/", "/v1/models", "/embed", "/admin/reload", "/openapi.json"):
            assert scraper.get(path).status_code == 404
            assert scraper.post(path, json={"inputs": "a"}).status_code == 404
        counted = 'sbert_http_requests_total{route="/metrics",status="200"} 1.0'
        assert counted in scraper.get("/metrics").text
    assert httpx.get(f"{server.url}/metrics", headers={"host": "here.example"}).status_code == 401
