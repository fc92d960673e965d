"""What a call notes for a caller that traces it."""

from __future__ import annotations

import asyncio
import time

import pytest

from sbert_infer import AsyncEngine, DeadlineError, Engine
from sbert_infer.scheduling.timeline import Timeline, current_timeline
from tests.doubles.backend import FakeBackend, Gate, run, until


async def encode(engine: AsyncEngine, texts: list[str], timeline: Timeline | None, timeout_s: float = 30.0) -> None:
    current_timeline.set(timeline)
    await engine.encode(texts, prompt="", timeout_s=timeout_s)


def test_a_batch_is_in_the_timelines_of_all_its_callers(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()
    timelines = [Timeline() for _ in range(3)]

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            busy = []
            for number in range(2):  # one after the other, or both would run in one batch
                busy.append(asyncio.ensure_future(encode(engine, [f"text {number}"], None)))
                await gate.wait_for(1)
            calls = [asyncio.ensure_future(encode(engine, ["a", "b"], timeline)) for timeline in timelines]
            await until(lambda: engine.stats().queued_texts == 6)
            assert not any(timeline.batches for timeline in timelines)
            gate.opened.set()
            await asyncio.gather(*busy, *calls)

    run(main)
    batches = {id(batch): batch for timeline in timelines for batch in timeline.batches}.values()
    assert sum(batch.texts for batch in batches) == 6
    assert max(batch.texts for batch in batches) > 2
    for timeline in timelines:
        assert timeline.arrival is not None
        assert all(timeline.arrival <= batch.started <= (batch.ended or 0) for batch in timeline.batches)


def test_a_batch_that_was_not_done_in_time_has_no_end(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()
    timeline = Timeline()

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            before = time.monotonic()
            with pytest.raises(DeadlineError):
                await encode(engine, ["a"], timeline, timeout_s=0.2)
            (batch,) = timeline.batches
            assert before <= batch.started
            assert batch.ended is None
            gate.opened.set()

    run(main)
