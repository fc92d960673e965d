"""`AsyncEngine`: cancelled calls, deadlines, and closing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sbert_infer import (
    AsyncEngine,
    DeadlineError,
    Engine,
    EngineError,
)
from sbert_infer.scheduling.call import Deadlines
from tests.doubles.backend import FakeBackend, Gate, run, until
from tests.models.checkpoints import TEXTS

# Cancelling, deadlines, closing -------------------------------------------------------------------


def test_cancelling_drops_what_has_not_started(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            first = [asyncio.ensure_future(engine.encode(text)) for text in TEXTS[:2]]
            await gate.wait_for(2)
            dropped = [asyncio.ensure_future(engine.encode(f"text {number}")) for number in range(200)]
            kept = asyncio.ensure_future(engine.encode("kept"))
            await until(lambda: engine.stats().queued_texts == 201)
            for call in dropped:
                call.cancel()
            assert all(
                isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*dropped, return_exceptions=True)
            )
            assert engine.stats().queued_texts == 1
            gate.opened.set()
            await asyncio.gather(*first, kept)
            assert sum(fakes[0].seen) == 3
            assert engine.stats().errors == {"CancelledError": 200}

    run(main)


def test_a_call_ends_at_its_deadline_and_does_not_run_later(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            first = [asyncio.ensure_future(engine.encode(text)) for text in TEXTS[:2]]
            await gate.wait_for(2)
            started = time.monotonic()
            with pytest.raises(DeadlineError, match="not done in time: raise timeout_s"):
                await engine.encode(["a", "b", "c"], timeout_s=0.2)
            assert time.monotonic() - started >= 0.2
            gate.opened.set()
            await asyncio.gather(*first)
            await engine.encode("d")
            assert sum(fakes[0].seen) == 3

    run(main)


def test_each_call_has_its_own_deadline(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()
    timeouts = [0.6, 0.2, 30.0, 0.4, 0.2]

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            held = [asyncio.ensure_future(engine.encode(text)) for text in ("first", "second")]
            await gate.wait_for(2)
            ends: list[float] = []

            async def call(number: int) -> None:
                started = time.monotonic()
                try:
                    await engine.encode(f"text {number}", timeout_s=timeouts[number])
                except DeadlineError:
                    assert time.monotonic() - started >= timeouts[number]
                    ends.append(timeouts[number])

            calls = [asyncio.ensure_future(call(number)) for number in range(len(timeouts))]
            await until(lambda: len(ends) == 4)
            assert sorted(ends) == [0.2, 0.2, 0.4, 0.6]
            assert engine.stats().queued_texts == 1  # the call with the long timeout
            gate.opened.set()
            await asyncio.gather(*held, *calls)
            assert len(ends) == 4

    run(main)


def test_many_deadlines_are_looked_at_together(
    small: Engine, fakes: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = fakes[0].fault = Gate()
    looks = []
    look = Deadlines._look

    def counted(self: Deadlines) -> None:
        looks.append(1)
        look(self)

    monkeypatch.setattr(Deadlines, "_look", counted)

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            timeouts = [0.2 + number / 2000 for number in range(400)]
            calls = [engine.encode(f"{number}", timeout_s=timeout) for number, timeout in enumerate(timeouts)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(result) for result in results} == {DeadlineError}
            assert 1 <= len(looks) <= 60
            gate.opened.set()

    run(main)


def test_close_lets_calls_end(small_onnx: Path) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        engine = AsyncEngine(small_onnx)
        call = asyncio.ensure_future(engine.encode([f"{text} {n}" for n in range(50) for text in TEXTS]))
        await asyncio.sleep(0)
        await engine.close(drain_s=30)
        assert (await call).shape == (600, 24)
        assert not engine.ready
        with pytest.raises(EngineError, match="this engine is closed"):
            await engine.encode("late")
        assert isinstance(engine.engine, Engine)
        with pytest.raises(EngineError, match="this engine is closed"):
            engine.engine.encode("late")
        await engine.close()

    run(main)
    assert set(threading.enumerate()) <= before


def test_close_fails_what_does_not_end(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()

    async def main() -> None:
        engine = AsyncEngine(small)
        calls = [asyncio.ensure_future(engine.encode([f"{n} {text}" for text in TEXTS])) for n in range(3)]
        await gate.wait_for(2)
        await engine.close(drain_s=0.1)
        for call in calls:
            with pytest.raises(EngineError, match="closed during this call"):
                await call
        gate.opened.set()

    run(main)
    assert small.encode("still open").shape == (24,)  # an engine passed in is not closed


EXIT = """
import asyncio, sys, time
from sbert_infer import AsyncEngine

async def main():
    engine = AsyncEngine(sys.argv[1])
    engine._pipeline.backend.run = lambda *_, **__: time.sleep(1000)
    asyncio.ensure_future(engine.encode("hangs"))
    await asyncio.sleep(0.2)
    print("end")

asyncio.run(main())
"""


def test_a_worker_that_hangs_does_not_keep_the_process(small_onnx: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, small_onnx], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
