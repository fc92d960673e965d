"""The server on a real Ray cluster, whose replicas are killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from starlette.requests import Request

from sbert_infer import Engine, EngineError
from sbert_infer.errors import DeadlineError, WorkerError
from sbert_infer.integrations import ray_serve
from sbert_infer.integrations.ray_serve import EnoughReplicas, Gateway, HttpRequest, HttpResponse, app
from sbert_infer.serve.settings import Settings
from tests.sbert_infer.serve.conftest import until

KEY = "a key for the cluster"
TEXTS = [f"text number {n} {'and more ' * (n % 40)}" for n in range(300)]
CLIENTS, REQUESTS = 6, 20
PATIENT = {"max_wait_s": 60.0, "timeout_s": 60.0}  # on a slow machine, too, no request is refused


@dataclass
class Deployed:
    """The application on a cluster: over HTTP, and by its handle."""

    url: str
    handle: Any

    def post(self, path: str, body: Any, key: str = KEY) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node for the controller and the proxy, and two more for replicas."""
    pytest.importorskip("fastapi", reason="Ray Serve is not installed: pip install 'sbert-infer[serve,ray-serve]'")
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 100 << 20, "memory": 3 << 30}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **small})
    for _ in range(2):
        cluster.add_node(num_cpus=1, **small)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def deployed(cluster: Any, small_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    from ray import serve

    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(KEY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    # As a command line gives them: strings, but for settings that it can't give.
    args = {"model": f"small={small_onnx}", "min_replicas": "2", "max_replicas": "2", "num_cpus": "0.9"}
    settings = {"auto_truncate": True, "max_body_bytes": 100_000, **PATIENT}
    args |= {"api_key_file": str(keys), "settings": settings}  # type: ignore[dict-item]
    handle = serve.run(app(args), name="sbert", route_prefix="/")
    return Deployed(f"http://127.0.0.1:{port}", handle)


@pytest.fixture(scope="module")
def expected(small_onnx: Path) -> np.ndarray[Any, Any]:
    with Engine(small_onnx, on_truncate="ignore") as engine:
        return np.asarray(engine.encode(TEXTS, normalize_embeddings=True))


def replica_processes(cluster: Any) -> list[int]:
    """The processes of replicas on this cluster; the machine may have others."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title, parent = (
                (folder / "cmdline").read_text(),
                (folder / "stat").read_text().rpartition(")")[2].split()[1],
            )
        except OSError:  # it has ended meanwhile
            continue
        if "ServeReplica:sbert:Replica" in title and int(parent) in raylets:
            found.append(int(folder.name))
    return found


def test_the_routes_are_those_of_the_server(deployed: Deployed, expected: np.ndarray[Any, Any]) -> None:
    response = deployed.post("/v1/embeddings", {"input": TEXTS[:3], "model": "small"})
    assert response.status_code == 200
    vectors = [each["embedding"] for each in response.json()["data"]]
    assert np.allclose(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), expected[:3], atol=1e-6)
    tei = deployed.post("/embed", {"inputs": TEXTS[:3]})
    assert np.allclose(tei.json(), expected[:3], atol=1e-6)
    assert httpx.get(f"{deployed.url}/health/ready", timeout=60).status_code == 200


def test_problems_come_back_as_they_are(deployed: Deployed) -> None:
    assert deployed.post("/embed", {"inputs": "x"}, key="wrong").status_code == 401
    unknown = deployed.post("/v1/embeddings", {"input": "x", "model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert deployed.post("/embed", {"inputs": "x" * 200_000}).status_code == 413
    assert unknown.headers["x-request-id"]


def test_what_only_one_replica_knows_is_not_served(deployed: Deployed) -> None:
    metrics = httpx.get(f"{deployed.url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=60)
    assert metrics.status_code == 404
    assert "each replica" in metrics.json()["error"]
    assert deployed.post("/admin/reload", {}).status_code == 404


def test_the_handle_gives_arrays_and_raises_our_errors(deployed: Deployed, expected: np.ndarray[Any, Any]) -> None:
    vectors = deployed.handle.embed.remote(TEXTS[:5], normalize_embeddings=True, on_truncate="ignore").result()
    assert vectors.dtype == np.float32
    assert np.allclose(vectors, expected[:5], atol=1e-6)
    with pytest.raises(ValueError, match="is not among"):
        deployed.handle.embed.remote("x", prompt_name="unknown").result()


def test_no_request_is_lost_when_replicas_are_killed(
    deployed: Deployed, cluster: Any, expected: np.ndarray[Any, Any]
) -> None:
    """Each replica is killed once, while requests run in it."""
    done = threading.Semaphore(0)

    def over_http() -> list[float]:
        response = deployed.post("/embed", {"inputs": TEXTS})
        assert response.status_code == 200, response.text
        vectors: list[float] = response.json()
        return vectors

    def by_handle() -> Any:
        return deployed.handle.embed.remote(TEXTS, normalize_embeddings=True, on_truncate="ignore").result(
            timeout_s=120
        )

    def client(ask: Callable[[], Any]) -> list[bool]:
        equal = []
        for _ in range(REQUESTS):
            equal.append(np.allclose(ask(), expected, atol=1e-6))
            done.release()
        return equal

    def wait_for(responses: int) -> None:
        for _ in range(responses):
            assert done.acquire(timeout=120)

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(client, ask) for ask in (over_http, by_handle) * (CLIENTS // 2)]
        wait_for(CLIENTS)
        first, second = replica_processes(cluster)
        os.kill(first, signal.SIGKILL)
        wait_for(CLIENTS)
        until(lambda: len(set(replica_processes(cluster)) - {first, second}) == 1, 120)
        os.kill(second, signal.SIGKILL)
        assert [future.result() for future in answers] == [[True] * REQUESTS] * CLIENTS
    until(lambda: len(set(replica_processes(cluster)) - {first, second}) == 2, 120)


def test_waiting_tokens_add_a_replica_and_an_update_loses_nothing(
    deployed: Deployed, cluster: Any, small_onnx: Path, expected: np.ndarray[Any, Any]
) -> None:
    """The update replaces every replica while requests run: each ends those that it has."""
    from ray import serve

    def ask() -> bool:
        response = deployed.handle.embed.remote(TEXTS, normalize_embeddings=True, on_truncate="ignore")
        return np.allclose(response.result(timeout_s=120), expected, atol=1e-6)

    def client() -> list[bool]:
        equal = [ask() for _ in range(REQUESTS)]
        while not scaled.is_set():
            equal.append(ask())
        return equal

    before, scaled = set(replica_processes(cluster)), threading.Event()
    args = {"model": str(small_onnx), "max_replicas": 2, "num_cpus": 0.8, "target_requests": 1e6}
    args |= {"target_queue_tokens": 1, "upscale_delay_s": 0, "settings": PATIENT}
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            serve.run(app(args), name="sbert", route_prefix="/")
            until(lambda: len(set(replica_processes(cluster)) - before) == 2, 120)
        finally:
            scaled.set()
        assert all(all(future.result()) for future in answers)


class Dying:
    """A handle to replicas that die with every request."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, method: str) -> Any:
        from ray.exceptions import ActorDiedError

        async def call(*args: Any, **kwargs: Any) -> None:
            self.calls += 1
            raise ActorDiedError

        return SimpleNamespace(remote=call)


def test_a_request_that_kills_every_replica_is_given_up() -> None:
    pytest.importorskip("ray")
    replicas = Dying()
    gateway = Gateway(replicas, Settings(models=()))
    with pytest.raises(WorkerError, match="3 replicas in turn died"):
        asyncio.run(gateway.embed("a text"))
    assert replicas.calls == 3


def test_a_request_does_not_wait_for_ever() -> None:
    pytest.importorskip("ray")
    never = SimpleNamespace(embed=SimpleNamespace(remote=lambda *args: asyncio.sleep(3600)))
    gateway = Gateway(never, Settings(models=(), timeout_s=0.05))
    with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        asyncio.run(gateway.embed("a text"))


def test_bodies_have_bounded_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_serve, "_LEAST_HELD_BYTES", 0)

    def request(size: int) -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * size, "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": []}
        return Request(scope, receive)

    async def main() -> None:
        may_end = asyncio.Event()

        async def respond(request: HttpRequest) -> HttpResponse:
            await may_end.wait()
            return HttpResponse(200, [], b"")

        replicas = SimpleNamespace(http=SimpleNamespace(remote=respond))
        gateway = Gateway(replicas, Settings(models=(), max_body_bytes=100_000))
        passed = [asyncio.ensure_future(gateway(request(100_000))) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert (await gateway(request(100_000))).status_code == 429
        passed.append(asyncio.ensure_future(gateway(request(1000))))  # an ordinary one
        await asyncio.sleep(0.05)
        may_end.set()
        assert [response.status_code for response in await asyncio.gather(*passed)] == [200] * 9
        assert (await gateway(request(100_000))).status_code == 200

    asyncio.run(main())


def test_unknown_arguments_are_refused() -> None:
    pytest.importorskip("fastapi", reason="Ray Serve is not installed")
    with pytest.raises(msgspec.ValidationError, match="replicas"):
        app({"model": "model.onnx", "replicas": 3})
    for setting, value in (("compute", "auto"), ("otlp_endpoint", "http://127.0.0.1:4318")):
        with pytest.raises(EngineError, match=f"leave out {setting}"):
            app({"model": "model.onnx", "settings": {setting: value}})


@pytest.mark.parametrize(
    ("requests", "tokens", "wanted"),
    [(0, {}, 0), (64, {}, 1), (65, {}, 2), (10, {"a": 9000.0, "b": 9000.0}, 2), (640, {"a": 100_000.0}, 10)],
)
def test_replicas_follow_requests_and_waiting_tokens(requests: float, tokens: dict[str, float], wanted: int) -> None:
    context = SimpleNamespace(total_num_requests=requests, aggregated_metrics={"queued_tokens": tokens})
    assert EnoughReplicas(requests=64, queue_tokens=16384)(context)[0] == wanted


def test_replicas_follow_requests_before_any_tokens_are_known() -> None:
    context = SimpleNamespace(total_num_requests=3, aggregated_metrics=None)
    assert EnoughReplicas(requests=2, queue_tokens=16384)(context)[0] == 2
