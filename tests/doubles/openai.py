"""A double of an OpenAI embeddings server with faults on demand: real HTTP, but no model."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

DIM = 8


def vector_of(text: str) -> npt.NDArray[np.float32]:
    """A vector that is unique to the text."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


@dataclass
class OpenAIDouble:
    """Handles one request at a time, in `service_s`. Attributes set its other behaviour."""

    service_s: float = 0.0
    max_queue: int = 10**9  # requests; beyond it, 429
    wrong_every: int = 0  # every n-th response has another text's vectors
    nan_every: int = 0
    drop_every: int = 0  # close the connection instead of every n-th response
    fail_every: int = 0  # 500
    longest: int = 10**9  # characters of a text; beyond it, 400
    key: str = ""
    stall_at: int = 0  # before this request, everything stops for `stall_s`
    stall_s: float = 0.0
    garbage: bool = False  # what comes back is not HTTP
    hold_until: int = 0  # nothing comes back before this many requests have come
    chunked: bool = False
    requests: int = 0
    connections: int = 0
    queued: int = 0
    authorizations: set[str] = field(default_factory=set)
    port: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        try:
            while answer := await self._answer(await reader.readuntil(b"\r\n\r\n"), reader):
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        self.authorizations.add(headers.get("authorization", ""))
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return self._http(401, {"error": {"message": "who are you?"}})
        if lines[0].startswith("GET /v1/models "):
            return self._http(200, {"object": "list", "data": [{"id": "double", "object": "model"}]})
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        return await self._embed(body)

    async def _embed(self, body: dict[str, Any]) -> bytes:
        self.requests += 1
        number = self.requests
        if max(map(len, body["input"])) > self.longest:
            return self._http(400, {"error": {"message": "text 0 is too long"}})
        if self.queued >= self.max_queue:
            return self._http(429, {"error": {"message": "overloaded"}})
        await self._work(number)
        while self.requests < self.hold_until:
            await asyncio.sleep(0.01)
        if self.garbage:
            return b"220 smtp.example.org ready\r\n"
        if self.drop_every and number % self.drop_every == 0:
            return b""
        if self.fail_every and number % self.fail_every == 0:
            return self._http(500, {"error": {"message": "oh"}})
        return self._http(200, self._vectors(number, body))

    async def _work(self, number: int) -> None:
        self.queued += 1
        try:
            async with self._turn:
                if self.stall_at and number >= self.stall_at:
                    self.stall_at = 0
                    await asyncio.sleep(self.stall_s)
                if self.service_s:
                    await asyncio.sleep(self.service_s)
        finally:
            self.queued -= 1

    def _vectors(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        wrong = self.wrong_every and number % self.wrong_every == 0
        vectors = [vector_of(text + "!" if wrong else text) for text in body["input"]]
        if self.nan_every and number % self.nan_every == 0:
            vectors = [vector * np.float32("nan") for vector in vectors]
        packed = body["encoding_format"] == "base64"
        data = [
            {"index": place, "embedding": base64.b64encode(one.tobytes()).decode() if packed else one.tolist()}
            for place, one in enumerate(vectors)
        ]
        return {"object": "list", "data": data[::-1]}  # the index says where each belongs

    def _http(self, status: int, content: dict[str, Any]) -> bytes:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} Some Reason\r\ncontent-type: application/json\r\n"
        if self.chunked:
            half = len(body) // 2
            parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:], b""))
            return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + parts
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def running(double: OpenAIDouble) -> Iterator[OpenAIDouble]:
    """Serve on a free port, in a thread of its own."""
    started = threading.Event()
    ended: list[Callable[[], object]] = []

    async def main() -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(double.serve, "127.0.0.1", 0, backlog=1024)
        double.port = server.sockets[0].getsockname()[1]
        ended.append(lambda: loop.call_soon_threadsafe(end.set))
        started.set()
        await end.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert started.wait(30)
        yield double
    finally:
        ended[0]()
        thread.join()
