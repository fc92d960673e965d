"""Many clients at once: each request gets one response, with its own vectors."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.serve.settings import ModelFile, Settings
from tests.sbert_infer.serve.conftest import Running, start

CLIENTS = 64
SECONDS = 4
WORDS = ["sea", "cat", "rain", "falls", "tune", "trade", "story", "old", "wind", "home", "light", "river", "stone"]


@pytest.fixture(scope="module")
def server(minilm_onnx: Path) -> Iterator[Running]:
    running = start(Settings((ModelFile(minilm_onnx, "minilm"),), port=0, timeout_s=120))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Short and long ones, each like no other."""
    chosen, lengths = np.random.default_rng(5), itertools.cycle([2, 3, 5, 8, 13, 21, 34, 90])
    return [f"{number} " + " ".join(chosen.choice(WORDS, next(lengths))) for number in range(160)]


async def ask(client: httpx.AsyncClient, chosen: list[str]) -> Any:
    """The vectors of some texts, by one of the routes."""
    if len(chosen) % 2:
        response = await client.post("/embed", json={"inputs": chosen})
        assert response.status_code == 200, response.text
        return response.json()
    response = await client.post("/v1/embeddings", json={"input": chosen})
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


async def keep_asking(url: str, number: int, texts: list[str], found: list[tuple[list[int], Any]]) -> None:
    chosen, end = np.random.default_rng(number), time.monotonic() + SECONDS
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while time.monotonic() < end:
            rows = chosen.integers(len(texts), size=chosen.choice([1, 1, 1, 2, 3, 8])).tolist()
            found.append((rows, await ask(client, [texts[row] for row in rows])))


async def load(url: str, texts: list[str]) -> list[tuple[list[int], Any]]:
    found: list[tuple[list[int], Any]] = []
    await asyncio.gather(*(keep_asking(url, number, texts, found) for number in range(CLIENTS)))
    return found


def test_every_request_gets_its_own_vectors(server: Running, minilm_onnx: Path, texts: list[str]) -> None:
    with Engine(minilm_onnx) as engine:
        expected = engine.encode(texts)
    cosines = expected @ expected.T - np.eye(len(texts))
    assert cosines.max() < 0.9999  # or one could be taken for another
    found = asyncio.run(load(server.url, texts))
    assert len(found) >= CLIENTS
    for rows, vectors in found:
        assert len(vectors) == len(rows)
        assert (np.sum(np.array(vectors) * expected[rows], axis=1) >= 0.99999).all()
    stats = server.server.models.first.engine.stats()
    assert (stats.queued_texts, stats.queued_tokens, stats.running_batches) == (0, 0, 0)
    assert answered(server) == Counter({"200": len(found)})


def answered(server: Running) -> Counter[str]:
    """Responses of the routes that embed by status, as the server counted them."""
    counted: Counter[str] = Counter()
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith("sbert_http_requests_total{route=") and "/embed" in line:
            counted[line.split('status="')[1][:3]] += int(float(line.rsplit(" ", 1)[1]))
    return counted
