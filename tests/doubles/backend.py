"""A backend that computes nothing, for tests of the code around one, and asyncio helpers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sbert_infer import Engine
from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.base import Backend, Batch
from sbert_infer.text.packing import Packer
from sbert_infer.types import Shape

Vectors = npt.NDArray[np.float32]


class FakeBackend:
    """Returns a vector that depends only on the text, not on its batch, after calling `fault`."""

    device = "cpu"
    workers = 2
    spare_workers = 0
    threads = 1
    max_batch_tokens = 128
    min_batch_tokens = 16
    packer: Packer | None = None
    length_multiple = 1
    outputs: tuple[str, ...] = (SENTENCE,)

    def __init__(self, fault: Callable[[Vectors], object] = lambda vectors: None) -> None:
        self.fault = fault
        self.seen: list[int] = []  # number of texts in each batch
        self.closed = False

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Vectors]:
        assert list(outputs) == [SENTENCE]
        self.seen.append(len(batch.ids))
        places = np.arange(1, batch.shape[1] + 1) * batch.mask
        vectors: Vectors = np.sin((batch.ids * places).sum(1, keepdims=True) + np.arange(32)).astype(np.float32)
        self.fault(vectors)
        return [vectors]

    def describe(self) -> str:
        return "fake"

    def close(self) -> None:
        self.closed = True


class PackingBackend(FakeBackend):
    """As `FakeBackend`, with the same vectors, but takes packed rows of a few shapes."""

    def __init__(self, *shapes: Shape) -> None:
        super().__init__()
        self.packer = Packer(shapes, hidden=32)
        self.max_batch_tokens = self.packer.max_tokens
        self.shapes: list[tuple[int, int]] = []  # of each batch

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Vectors]:
        packing = batch.packing
        assert packing is not None
        assert batch.shape in {shape[:2] for shape in self.packer.shapes}  # type: ignore[union-attr]
        self.shapes.append(batch.shape)
        sums = []
        for row, segment in zip(*np.divmod(packing.texts, packing.starts.shape[1]), strict=True):
            own = packing.segments[row] == segment + 1
            pooled = np.zeros_like(own)
            pooled[packing.starts[row, segment] : packing.ends[row, segment]] = True
            assert not (pooled & ~own).any()
            assert packing.positions[row][own].tolist() == list(range(np.count_nonzero(own)))
            assert (batch.mask[row][own] == 1).all()
            sums.append((batch.ids[row] * (packing.positions[row] + 1))[pooled].sum())
        assert np.count_nonzero(batch.mask) == np.count_nonzero(packing.segments)
        return [np.sin(np.array(sums)[:, None] + np.arange(32)).astype(np.float32)]


def run_ids(backend: Backend, ids: Any, mask: Any, prompt_length: int = 0, *, alone: bool = False) -> Vectors:
    """Run a batch of these arrays, [rows, length], and return the model's first output."""
    (found,) = backend.run(Batch(ids, mask, None, prompt_length), backend.outputs[:1], alone=alone)
    return found


def install(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """Give `engine` fake backends, and return them: one now, one more at each `replace_backend`."""
    fakes = [FakeBackend()]
    engine.pipeline.backend.close()
    engine.pipeline.backend = fakes[0]

    def open_fake(*_: object) -> FakeBackend:
        fakes.append(FakeBackend())
        return fakes[-1]

    monkeypatch.setattr("sbert_infer.opening.open_backend", open_fake)
    return fakes


class Gate:
    """A fault that blocks every batch until the gate is opened."""

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
