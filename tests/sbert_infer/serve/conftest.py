"""Real servers on free ports, with a small real model, for tests over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import append_metadata
from sbert_infer.serve.server import Server
from sbert_infer.serve.settings import ModelFile, Settings

PROMPTS = {"query": "find this: ", "document": "a text about "}
STARTING_S = 60


@dataclass
class Running:
    """A server in a thread of this process. `url`, the base of `client`, ends without a slash."""

    server: Server
    thread: threading.Thread
    url: str
    client: httpx.Client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send JSON."""
        return self.client.post(path, json=body, **options)

    def connections(self) -> int:
        """How many clients are connected."""
        http = self.server._uvicorn
        return 0 if http is None else len(http.server_state.connections)

    def stop(self) -> None:
        """Stop as SIGTERM would; returns when everything is closed."""
        self.client.close()
        if self.thread.is_alive():
            self.server.stop_soon()
            self.thread.join(STARTING_S)
        assert not self.thread.is_alive(), "the server does not stop"


def start(settings: Settings) -> Running:
    """Start a server and wait until it takes requests."""
    started = threading.Event()
    urls: list[str] = []
    errors: list[BaseException] = []

    def on_started(url: str) -> None:
        urls.append(url)
        started.set()

    server = Server(settings, on_started)

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="server", daemon=True)
    thread.start()
    assert started.wait(STARTING_S), "the server does not start"
    if errors:
        raise errors[0]
    headers = {"authorization": f"Bearer {settings.keys[0]}"} if settings.keys else {}
    return Running(server, thread, urls[0], httpx.Client(base_url=urls[0], headers=headers, timeout=30))


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def served_onnx(export_checkpoint: Callable[..., Path]) -> Path:
    """The small model that the servers serve: 32 numbers a vector, of any length, and two prompts.

    Shared: change only a copy.
    """
    return export_checkpoint("bert", prompts=PROMPTS, similarity="cosine", normalize=False)


@pytest.fixture
def make_variant(served_onnx: Path, tmp_path: Path) -> Callable[..., Path]:
    """`make_variant("name", similarity="dot", ...)`: the same graph with a changed manifest."""

    def make(name: str, **changes: Any) -> Path:
        artifact = open_artifact(served_onnx)
        target = tmp_path / f"{name}.onnx"
        with target.open("w+b") as file:
            file.write(served_onnx.read_bytes()[: _graph_size(served_onnx)])
            append_metadata(file, replace(artifact.manifest, **changes), artifact.tokenizer_json)
        return target

    return make


def _graph_size(path: Path) -> int:
    """Where the metadata begins, as the last entry of the file says."""
    return int(path.read_bytes()[-16:])


@pytest.fixture
def start_server(served_onnx: Path) -> Iterator[Callable[..., Running]]:
    """`start_server(keys=("secret",), ...)`: a server of its own for a test, stopped after it.

    Takes the fields of `Settings`; by default it serves `served_onnx` as "small" on a free port.
    """
    running: list[Running] = []

    def make(**settings: Any) -> Running:
        settings = {"models": (ModelFile(served_onnx, "small"),), "port": 0, "drain_s": 5.0, **settings}
        running.append(start(Settings(**settings)))
        return running[-1]

    yield make
    for server in running:
        server.stop()


@pytest.fixture(scope="module")
def server(served_onnx: Path) -> Iterator[Running]:
    """A server that the tests of a file share: no keys, model "small"."""
    running = start(Settings((ModelFile(served_onnx, "small"),), port=0, drain_s=5.0))
    yield running
    running.stop()
