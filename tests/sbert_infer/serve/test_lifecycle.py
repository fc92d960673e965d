"""The command as a process: start, signals, end. What it prints and how it exits."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

Start = Callable[..., "Process"]


class Process:
    """`sbert-serve` in a process of its own, with its log in a file."""

    def __init__(self, log: Path, *arguments: str, stderr: Path | None = None, **environment: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "sbert_infer.serve.cli", *arguments]
        with (stderr or log).open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, env={**os.environ, **environment})

    @property
    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """The first line that has `pattern`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.lines:
                if re.search(pattern, line):
                    return line
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def url(self) -> str:
        return self.wait_for("serving small on").rsplit(" on ", 1)[1].strip('"}')

    def exit(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def start_process(served_onnx: Path, tmp_path: Path) -> Iterator[Start]:
    made: list[Process] = []

    def start(*arguments: str, **options: Any) -> Process:
        log = tmp_path / f"log{len(made)}"
        made.append(Process(log, f"small={served_onnx}", "--port", "0", *arguments, **options))
        return made[-1]

    yield start
    for process in made:
        process.process.kill()
        process.process.wait()


def embed(url: str, texts: list[str]) -> httpx.Response:
    return httpx.post(f"{url}/embed", json={"inputs": texts}, timeout=60)


def test_sigterm_under_load_finishes_what_came(start_process: Start) -> None:
    process = start_process("--drain-delay-s", "2")
    url = process.url()
    statuses: list[int] = []
    refused = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not refused.is_set():
                try:
                    answer = client.post("/embed", json={"inputs": [f"{len(statuses)} {n}" for n in range(200)]})
                except httpx.ConnectError:  # noqa: PERF203
                    refused.set()
                else:
                    statuses.append(answer.status_code)

    with ThreadPoolExecutor(4) as threads, httpx.Client(base_url=url) as prober:
        asking = [threads.submit(ask) for _ in range(4)]
        while len(statuses) < 4:
            time.sleep(0.01)
        process.process.send_signal(signal.SIGTERM)
        process.wait_for("stopping")
        probe = prober.get("/health/ready")
        assert probe.status_code == 503
        assert probe.headers["connection"] == "close"
        assert "about to stop" in probe.json()["error"]
        assert prober.get("/health/live").status_code == 200
        for future in asking:
            future.result()
    assert process.process.wait(30) == 0
    assert set(statuses) == {200}
    assert "stopped" in process.lines[-1]


def test_a_client_that_stalls_does_not_hold_up_the_end(start_process: Start) -> None:
    process = start_process("--drain-s", "1")
    url = httpx.URL(process.url())
    with socket.create_connection((url.host, url.port)) as connection:  # type: ignore[arg-type]
        connection.sendall(b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
        time.sleep(0.2)
        assert process.exit() == 0


def test_a_second_signal_ends_it_at_once(start_process: Start) -> None:
    process = start_process("--drain-delay-s", "60")
    process.url()
    process.process.send_signal(signal.SIGINT)
    process.wait_for("stopping")
    assert process.exit(signal.SIGINT) == 128 + signal.SIGINT


def test_sighup_revokes_a_key(start_process: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    process = start_process("--api-key-file", str(keys))
    headers = {"authorization": "Bearer old"}
    assert httpx.get(f"{process.url()}/v1/models", headers=headers).status_code == 200
    keys.write_text("new\n")
    process.process.send_signal(signal.SIGHUP)
    process.wait_for("reloaded small")
    assert httpx.get(f"{process.url()}/v1/models", headers=headers).status_code == 401
    assert process.exit() == 0


def test_sighup_reloads(start_process: Start) -> None:
    process = start_process("--log-json", SBERT_SERVE_API_KEY="from the environment")
    url = process.url()
    process.process.send_signal(signal.SIGHUP)
    process.wait_for("reloaded small")
    assert embed(url, ["a"]).status_code == 401
    headers = {"authorization": "Bearer from the environment", "x-request-id": "id-7"}
    assert httpx.post(f"{url}/embed?q=hidden", json={"inputs": "a secret text"}, headers=headers).status_code == 200
    assert process.exit() == 0
    entries = [json.loads(line) for line in process.lines]
    (answered,) = [entry for entry in entries if entry.get("request_id") == "id-7"]
    assert {name: answered[name] for name in ("method", "path", "status", "texts", "level")} == {
        "method": "POST",
        "path": "/embed",
        "status": 200,
        "texts": 1,
        "level": "info",
    }
    assert answered["tokens"] > 2
    assert answered["bytes"] > 32
    assert answered["ms"] > 0
    written = process.log.read_text()
    assert "secret" not in written
    assert "hidden" not in written
    assert "environment" not in written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_for_logs_affects_no_request(start_process: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start_process("--port", str(port), stderr=Path("/dev/full"))
    transport = httpx.HTTPTransport(retries=9)  # until it listens
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=30) as client:
        for _ in range(20):
            assert client.post("/embed", json={"inputs": "a"}).status_code == 200
    assert process.exit() == 0


def test_open_to_the_network_without_keys_is_said(start_process: Start) -> None:
    process = start_process("--host", "0.0.0.0")  # noqa: S104
    process.wait_for("warning: anyone who can reach http://0.0.0.0:")
    assert process.exit() == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_https(start_process: Start, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += [
        "-keyout",
        str(key),
        "-out",
        str(cert),
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run(command, check=True, capture_output=True)
    process = start_process("--tls-cert", str(cert), "--tls-key", str(key), "--read-timeout-s", "1")
    url = process.url()
    assert url.startswith("https://")
    context = ssl.create_default_context(cafile=str(cert))
    assert httpx.post(f"{url}/embed", json={"inputs": "a"}, verify=context).status_code == 200
    host, port = url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as silent:
        assert silent.recv(1) == b""  # it is not waited for
    assert process.exit() == 0
