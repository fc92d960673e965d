"""A backend that computes nothing, for tests of what happens around one; and helpers to drive it from asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sbert_infer import Engine

Vectors = npt.NDArray[np.float32]


class FakeBackend:
    """A vector that is each text's own, whatever batch it runs in; and before that, whatever `fault` does."""

    device = "cpu"
    workers = 2
    threads = 1
    max_batch_tokens = 128
    min_batch_tokens = 16
    edges: tuple[int, ...] | None = None

    def __init__(self, fault: Callable[[Vectors], object] = lambda vectors: None) -> None:
        self.fault = fault
        self.seen: list[int] = []  # texts in each batch
        self.closed = False

    def run(self, input_ids: Any, attention_mask: Any, prompt_length: int = 0, *, alone: bool = False) -> Vectors:
        self.seen.append(len(input_ids))
        places = np.arange(1, input_ids.shape[1] + 1) * attention_mask
        vectors: Vectors = np.sin((input_ids * places).sum(1, keepdims=True) + np.arange(32)).astype(np.float32)
        self.fault(vectors)
        return vectors

    def describe(self) -> str:
        return "fake"

    def close(self) -> None:
        self.closed = True


def install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """Give `engine` a fake instead of its model. Another joins the list whenever the engine opens its model again."""
    fakes = [FakeBackend()]
    engine._open().backend.close()
    engine._open().backend = fakes[0]

    def open_fake(*_: object) -> FakeBackend:
        fakes.append(FakeBackend())
        return fakes[-1]

    monkeypatch.setattr("sbert_infer.base_engine.open_backend", open_fake)
    return fakes


class Gate:
    """A fault that holds up every batch until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, vectors: Vectors) -> None:
        self.entered.release()
        assert self.opened.wait(timeout=30)

    async def wait_for(self, batches: int) -> None:
        for _ in range(batches):
            assert await asyncio.to_thread(self.entered.acquire, timeout=30)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main(), 60)

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.005)
