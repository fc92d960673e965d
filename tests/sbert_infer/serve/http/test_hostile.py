"""Hostile clients, and clients that do not speak HTTP: memory is bounded, others are served."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sbert_infer.serve.conftest import Running, until
from tests.sbert_infer.serve.http.test_floods import send_all_it_takes
from tests.sbert_infer.serve.test_lifecycle import Process

JSON = {"content-type": "application/json"}
BODY = b'{"inputs": "A cat sat."}'
HEAD = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
ASK = HEAD + b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
MB = 2**20


@dataclass
class Victim:
    """A server in another process."""

    process: Process
    client: httpx.Client

    def connect(self) -> socket.socket:
        assert self.client.base_url.port is not None
        return socket.create_connection((self.client.base_url.host, self.client.base_url.port), timeout=30)

    def says(self, *sent: bytes) -> bytes:
        """Send some bytes, and read until the server closes."""
        said = b""
        with self.connect() as connection, contextlib.suppress(ConnectionError):
            for data in sent:
                connection.sendall(data)
            while chunk := connection.recv(2**16):
                said += chunk
        return said

    def metric(self, name: str) -> float:
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        return float(value)

    def memory_mb(self) -> float:
        """The server's memory, from which on `peak_mb` counts."""
        Path(f"/proc/{self.process.process.pid}/clear_refs").write_text("5")
        return self.peak_mb()

    def peak_mb(self) -> float:
        """The peak of the server's memory."""
        status = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


@pytest.fixture(scope="module")
def victim(served_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    log = tmp_path_factory.mktemp("hostile") / "log"
    process = Process(log, f"small={served_onnx}", "--port", "0", "--auto-truncate")
    try:
        with httpx.Client(base_url=process.url(), timeout=60) as client:
            yield Victim(process, client)
        assert process.exit() == 0
        assert "unexpected" not in log.read_text()
    finally:
        process.process.kill()


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux, to see a process's memory")


# Memory -------------------------------------------------------------------------------------------

CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@needs_proc
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 1000),
        (CHUNKED + b"1\r\n \r\n0\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (CHUNKED + b"1\r\n \r\n0\r\nx: ", b"y" * 1000),
        (CHUNKED + b"5;", b"y" * 1000),
    ],
    ids=["header", "trailers", "trailer", "chunk extension"],
)
def test_what_is_no_body_is_bounded(victim: Victim, start: bytes, more: bytes) -> None:
    before = victim.memory_mb()
    with victim.connect() as connection:
        connection.sendall(start)
        with pytest.raises(ConnectionError):
            connection.sendall(more * 100_000)
    assert victim.peak_mb() - before < 20  # of 100 MB that were to come


@needs_proc
def test_requests_without_end_take_no_memory(victim: Victim) -> None:
    before = victim.memory_mb()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(victim.connect())
            send_all_it_takes(connection, b"GET / HTTP/1.1\r\n\r\n" * (8 * MB // 18))
        assert victim.client.get("/health/live").status_code == 200
        assert victim.peak_mb() - before < 60  # it was 900, of one connection


@needs_proc
@pytest.mark.parametrize(
    ("path", "start", "item", "message"),
    [
        ("/embed", b'{"inputs": ', b"[1]", "token ids are not accepted"),
        ("/embed", b'{"inputs": ', b'"abcd"', "at most 2048 inputs"),
        ("/predict", b'{"inputs": ', b"[]", "`array` of length 2"),
        ("/api/embed", b'{"model": "small", "input": "a", "options": {"x": ', b"[]", '"embeddings":'),  # ignored
        ("/api/embeddings", b'{"model": "small", "prompt": "a", "options": {"x": ', b"[]", '"embedding":'),
    ],
)
def test_millions_of_small_values_are_not_made(
    victim: Victim, path: str, start: bytes, item: bytes, message: str
) -> None:
    before = victim.memory_mb()
    items = (item + b",") * (12 * MB // (len(item) + 1)) + item
    content = start + b"[" + items + b"]" + b"}" * start.count(b"{")
    response = victim.client.post(path, content=content, headers=JSON)
    assert message in response.text
    assert victim.peak_mb() - before < 80  # the body, twice, and nothing made of it


@needs_proc
def test_many_bombs_at_once_take_no_more_than_the_room_there_is(victim: Victim) -> None:
    packer = zlib.compressobj(9, wbits=31)
    bomb = packer.compress(b'{"inputs": "' + b" " * (15 * MB)) + packer.flush(zlib.Z_SYNC_FLUSH)  # and no end
    head = HEAD + b"content-encoding: gzip\r\ncontent-length: 1000000\r\n\r\n"
    before = victim.memory_mb()
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(victim.connect()) for _ in range(20)]
        for connection in connections:
            connection.sendall(head + bomb)
        refused = select.select(connections, [], [], 30)[0]
        assert refused[0].recv(2**16).startswith(b"HTTP/1.1 429")
        assert victim.client.post("/embed", content=BODY, headers=JSON).status_code in (200, 429)
    assert victim.peak_mb() - before < 200  # of the 300 MB
    until(lambda: victim.client.post("/embed", content=BODY.ljust(15 * MB), headers=JSON).status_code == 200)


def test_a_text_without_end_is_refused(victim: Victim) -> None:
    for text in (" " * (MB + 1), "x" * (8 * MB)):
        response = victim.client.post("/embed", json={"inputs": ["a", text], "truncate": True})
        assert response.status_code == 413
        assert f"input 1 has {len(text)} characters, at most {MB} are read" in response.json()["error"]


def test_a_text_that_takes_long_holds_up_no_other_request(victim: Victim) -> None:
    calls = victim.metric('sbert_requests_total{model="small"}')
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(victim.client.post, "/embed", json={"inputs": [" " * (MB - n) for n in range(4)]})
        until(lambda: victim.metric('sbert_requests_total{model="small"}') == calls + 1)
        answered = 0
        while not slow.done():
            assert victim.client.get("/health/live").status_code == 200
            answered += 1
    assert slow.result().status_code == 200
    assert answered > 10  # others were answered all along


# Clients that leave -------------------------------------------------------------------------------


def test_nothing_is_left_of_clients_that_leave(victim: Victim) -> None:
    many = json.dumps({"inputs": [f"{number} cats sat" for number in range(50)]}).encode()
    ask = HEAD + b"content-length: %d\r\n\r\n%s" % (len(many), many)
    for number in range(400):
        with victim.connect() as connection:  # in the headers, in the body, or after it
            connection.sendall((ask[:20], ask[:-20], ask)[number % 3])
    until(lambda: victim.metric("sbert_http_requests_in_progress") == 1)  # the one that asks
    for priority in ("interactive", "bulk"):  # the last may be accepted only now
        labels = f'{{class="{priority}",model="small"}}'
        until(lambda labels=labels: victim.metric(f"sbert_queue_tokens{labels}") == 0)  # type: ignore[misc]
        until(lambda labels=labels: victim.metric(f"sbert_queue_texts{labels}") == 0)  # type: ignore[misc]
    until(lambda: victim.metric('sbert_running_batches{model="small"}') == 0)
    if Path("/proc/self/fd").exists():
        until(lambda: len(list(Path(f"/proc/{victim.process.process.pid}/fd").iterdir())) < 50)
    assert victim.client.post("/embed", content=BODY, headers=JSON).status_code == 200


# HTTP ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # https where http is spoken
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"NONSENSE /health HTTP/1.1\r\n\r\n",
        b"GET /he alth HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx: a\0b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx y: a\r\n\r\n",
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",  # a way to smuggle requests
        CHUNKED + b"ZZ\r\n",
        CHUNKED + b"F" * 17 + b"\r\n",
    ],
)
def test_what_is_no_http_gets_400(victim: Victim, sent: bytes) -> None:
    assert victim.says(sent).startswith(b"HTTP/1.1 400")


def test_requests_sent_at_once_are_answered_in_order(victim: Victim) -> None:
    end = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    said = victim.says(ASK.replace(b"host: x", b"x-request-id: 1") + ASK.replace(b"host: x", b"x-request-id: 2") + end)
    assert said.count(b"HTTP/1.1 200 OK") == 3
    assert 0 < said.index(b"x-request-id: 1\r\n") < said.index(b"x-request-id: 2\r\n")
    assert said.endswith(b'{"status":"ready"}')


def test_a_client_that_asks_whether_to_go_on(victim: Victim) -> None:
    with victim.connect() as connection:
        connection.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert connection.recv(2**16).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(BODY)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 OK")


def test_chunks_with_extensions_and_trailers(victim: Victim) -> None:
    chunks = b"".join(b"1;x=y\r\n%c\r\n" % byte for byte in BODY)
    said = victim.says(CHUNKED + chunks + b"0\r\nx: y\r\n\r\n" + b"GET /health HTTP/1.0\r\n\r\n")
    assert said.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(
    "path", ["//metrics", "/health/../metrics", "/health%2f..%2fmetrics", "/%6detrics", "/health;/metrics", "/health/"]
)
def test_no_path_leads_around_the_keys(start_server: Callable[..., Running], path: str) -> None:
    server = start_server(keys=("secret",))
    host = httpx.URL(server.url)
    assert host.port is not None
    with socket.create_connection((host.host, host.port), timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 401")


def test_a_slash_too_many_leads_nowhere(victim: Victim) -> None:
    response = victim.client.post("/v1/embeddings/", json={"input": "a"}, headers={"host": "evil.example"})
    assert response.status_code == 404
    assert "location" not in response.headers


# Bodies -------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["a", "query", "small"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
PATHS = {  # and the fields with which their requests begin
    "/v1/embeddings": ("input", "encoding_format", "dimensions", "prompt_name"),
    "/embeddings": ("input", "dimensions"),
    "/embed": ("inputs", "dimensions", "prompt_name"),
    "/": ("inputs", "query"),
    "/similarity": ("inputs", "parameters"),
    "/tokenize": ("inputs", "prompt_name"),
    "/decode": ("ids",),
    "/predict": ("inputs",),
    "/rerank": ("query", "texts", "documents"),
    "/score": ("text_1", "text_2", "queries", "documents"),
    "/v1/ranking": ("query", "passages"),
    "/v2/embed": ("texts", "embedding_types", "output_dimension"),
    "/api/embed": ("input", "dimensions", "options"),
}


def bodies_for(path: str) -> st.SearchStrategy[bytes]:
    """Objects with some of a path's fields; NaN and lone surrogates, too."""
    fields = st.sampled_from(("model", "truncate", *PATHS[path]))
    return st.dictionaries(fields, values).map(lambda body: json.dumps(body).encode())


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and something like its body, perhaps with some bytes replaced."""
    path = draw(st.sampled_from(sorted(PATHS)))
    body = draw(bodies_for(path))
    if draw(st.booleans()):
        start = draw(st.integers(0, len(body)))
        body = body[:start] + draw(st.binary(max_size=4)) + body[draw(st.integers(start, len(body))) :]
    return path, body


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests())
def test_no_body_is_the_servers_fault(victim: Victim, request_: tuple[str, bytes]) -> None:
    path, body = request_
    response = victim.client.post(path, content=body, headers=JSON)
    assert response.status_code in (200, 400, 404, 413, 422), response.text
    if response.status_code != 200:
        error = response.json()
        error = error.get("error", error)
        assert (error["message"] if isinstance(error, dict) else error) != ""


@pytest.mark.parametrize("nested", [b"[", b'{"inputs":'])
def test_deep_nesting_is_refused(victim: Victim, nested: bytes) -> None:
    for path in ("/embed", "/", "/v1/embeddings"):
        response = victim.client.post(path, content=b'{"inputs":' + nested * 200_000, headers=JSON)
        assert response.status_code in (400, 413, 422)
