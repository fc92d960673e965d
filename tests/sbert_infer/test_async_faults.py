"""`AsyncEngine` when a text, a worker or the backend fails: who gets an error, and what goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import AsyncEngine, Engine, EngineError, TextError, WorkerError
from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.scheduling.request import Work
from sbert_infer.scheduling.workers import Workers
from tests.doubles.backend import FakeBackend, Gate, Vectors, run, until
from tests.models.checkpoints import TEXTS


def vector_of(engine: Engine, text: str) -> Vectors:
    """Return the fake's vector of a text, as it comes out of the model."""
    pipeline = engine.pipeline
    tokenized = pipeline.tokenizer(["sort these by topic: " + text])
    ((vectors,), _) = pipeline.run_all(tokenized, (SENTENCE,), backend=FakeBackend())
    vector: Vectors = vectors[0]
    return vector


def faulty(engine: Engine, text: str, do: Callable[[Vectors, Any], object]) -> Callable[[Vectors], None]:
    """Return a fault for batches that contain `text`."""
    culprit = vector_of(engine, text)

    def fault(vectors: Vectors) -> None:
        found = (vectors == culprit).all(axis=1)
        if found.any():
            do(vectors, found)

    return fault


# A text that can't be tokenized -------------------------------------------------------------------


class Panic(BaseException):
    """Like the tokenizer's error when it fails in Rust: not an Exception."""


@pytest.mark.parametrize(
    ("error", "message"), [(ValueError("odd"), "odd"), (Panic("odd"), "the tokenizer failed: odd")]
)
def test_a_tokenizer_that_fails_on_a_text_fails_only_its_call(
    error: BaseException, message: str, small: Engine, fakes: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = small.encode(TEXTS)
    tokenizer = small.pipeline.tokenizer
    tokenize = type(tokenizer).__call__

    def fail(self: Any, texts: Any) -> Any:
        if any("a bad text" in text for text in texts):
            raise error
        return tokenize(self, texts)

    monkeypatch.setattr(type(tokenizer), "__call__", fail)

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            calls = [engine.encode(text) for text in TEXTS]
            *vectors, bad = await asyncio.gather(*calls, engine.encode("a bad text"), return_exceptions=True)
            np.testing.assert_array_equal(vectors, expected)
            assert isinstance(bad, Exception)
            assert message in str(bad)
            stats = engine.stats()
            assert (stats.queued_texts, stats.queued_tokens, stats.restarts, stats.ready) == (0, 0, 0, True)

    run(main)


# One bad text -------------------------------------------------------------------------------------


def spoil(vectors: Vectors, found: Any) -> None:
    vectors[found, 3] = np.nan


def spoil_all(vectors: Vectors, found: Any) -> None:
    vectors[:] = np.nan


def refuse(vectors: Vectors, found: Any) -> None:
    raise ValueError("no such token")


@pytest.mark.parametrize(
    ("do", "message"),
    [(spoil, "NaN or infinity"), (spoil_all, "NaN or infinity"), (refuse, "the model fails: no such token")],
)
def test_only_the_culprit_gets_the_error(
    do: Callable[[Vectors, Any], object], message: str, small: Engine, fakes: list[FakeBackend]
) -> None:
    others = [f"{number} {text}" for number in range(5) for text in TEXTS]
    expected = small.encode(others)
    fakes[0].fault = faulty(small, "a bad text", do)

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            bad = engine.encode([others[0], others[1], "a bad text", others[0]])
            results = await asyncio.gather(bad, *map(engine.encode, others), return_exceptions=True)
            assert isinstance(results[0], TextError)
            assert str(results[0]).startswith("text 2: ")
            assert message in str(results[0])
            np.testing.assert_array_equal(np.stack(results[1:]), expected)  # type: ignore[arg-type]
            assert engine.ready
            assert engine.stats().restarts == 0
            assert engine.stats().errors == {"TextError": 1}

    run(main)


def test_a_backend_that_gives_nan_for_everything_is_replaced(small: Engine, fakes: list[FakeBackend]) -> None:
    def spoil_everything(vectors: Vectors) -> None:
        vectors[:] = np.nan

    expected = small.encode(TEXTS[0])
    fakes[0].fault = spoil_everything

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            with pytest.raises(WorkerError, match="ordinary text"):
                await engine.encode(TEXTS[0])
            await until(lambda: engine.ready)
            np.testing.assert_array_equal(await engine.encode(TEXTS[0]), expected)

    run(main)


# Workers that hang or die -------------------------------------------------------------------------


def test_a_worker_that_hangs_is_replaced(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = Gate()
    expected = small.encode(list(TEXTS))
    fakes[0].fault = faulty(small, "a bad text", lambda vectors, found: gate(vectors))

    async def main() -> None:
        async with AsyncEngine(small, hang_timeout_s=0.3) as engine:
            hangs = asyncio.ensure_future(engine.encode("a bad text"))
            await gate.wait_for(1)
            fine = asyncio.ensure_future(engine.encode(list(TEXTS)))
            with pytest.raises(WorkerError, match=r"hung for 0\.3 s; retry in 1\.0 s") as lost:
                await hangs
            assert lost.value.retry_after_s == 1.0
            await until(lambda: engine.ready)
            np.testing.assert_array_equal(await fine, expected)
            np.testing.assert_array_equal(await engine.encode(list(TEXTS)), expected)
            assert len(fakes) == 2
            assert fakes[1].seen
            assert engine.stats().restarts == 1
            await until(lambda: fakes[0].closed)
            gate.opened.set()  # the worker returns, but nobody waits for its result
            np.testing.assert_array_equal(await engine.encode("a bad text"), small.encode("a bad text"))

    run(main)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_on_its_way_is_replaced(
    small: Engine, fakes: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, died = Workers._finish, threading.Event()

    def die_once(self: Workers, *arguments: Any) -> None:
        if died.is_set():
            return finish(self, *arguments)
        died.set()
        raise SystemExit  # ends a thread silently

    monkeypatch.setattr(Workers, "_finish", die_once)

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            with pytest.raises(WorkerError, match="the worker that ran it died"):
                await engine.encode("a cat")
            await until(lambda: engine.ready and len(fakes) == 2)
            np.testing.assert_array_equal(await engine.encode("a cat"), small.encode("a cat"))
            assert engine.stats().restarts == 1

    run(main)


def test_it_is_not_ready_while_a_worker_seems_to_hang(small: Engine, fakes: list[FakeBackend]) -> None:
    """`ready` turns off long before the batch is given up; nothing is lost if it was only slow."""

    async def main() -> None:
        async with AsyncEngine(small, hang_timeout_s=60) as engine:
            await engine.encode(TEXTS)
            gate = Gate()
            fakes[0].fault = gate
            call = asyncio.ensure_future(engine.encode(TEXTS[0]))
            await until(lambda: not engine.ready)
            assert not call.done()
            gate.opened.set()
            await call
            await until(lambda: engine.ready)
            assert engine.stats().restarts == 0

    run(main)


def test_a_large_batch_after_many_small_ones_does_not_seem_to_hang(small: Engine, fakes: list[FakeBackend]) -> None:
    async def main() -> None:
        async with AsyncEngine(small, hang_timeout_s=600) as engine:
            workers = engine._queue.workers
            for _ in range(50):
                await engine.encode("one")
            assert workers._usual_s is not None
            few, many = (Work([], length, 0, texts=8, tokens=8 * length) for length in (4, 512))
            workers._usual_s = 0.001  # as if measured: the large one takes 4 s
            assert workers._patience_s(few) == 3.0
            assert workers._patience_s(many) == pytest.approx(40.96)

    run(main)


def test_a_text_that_is_longer_than_a_batch_may_take_longer(small: Engine, fakes: list[FakeBackend]) -> None:
    """A full batch of 128 tokens has 20 s; one core may need minutes for 8,192 tokens."""
    hung = []

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            workers = engine._queue.workers
            workers._lose = lambda work, reason: hung.append((work.length, reason))  # type: ignore[method-assign]
            now = time.monotonic()
            for length, texts, seconds in [(8, 16, 15), (64, 2, 30), (1024, 1, 150), (2048, 1, 330), (8192, 1, 1200)]:
                work = Work([], length, 0, texts=texts, tokens=length * texts)
                work.started = work.last_started = now - seconds
                engine._queue.scheduler.running.add(work)
            await until(lambda: len(hung) >= 2)
            engine._queue.scheduler.running.clear()
            reasons = {64: "the worker that ran it hung for 20 s", 2048: "the worker that ran it hung for 320 s"}
            assert dict(hung) == reasons

    run(main)


def test_it_is_not_ready_until_the_worker_is_replaced(
    small: Engine, fakes: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, opened = threading.Event(), threading.Event()
    replace = small.replace_backend

    def slowly() -> Any:
        opening.set()
        assert opened.wait(timeout=30)
        return replace()

    monkeypatch.setattr(small, "replace_backend", slowly)

    def die(vectors: Vectors) -> None:
        raise SystemExit("the driver is gone")

    fakes[0].fault = die

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            assert engine.ready
            with pytest.raises(WorkerError, match=r"died: SystemExit\('the driver is gone'\)"):
                await engine.encode("one")
            assert not engine.ready
            waits = asyncio.ensure_future(engine.encode("two"))
            assert await asyncio.to_thread(opening.wait, 1.0)
            assert not engine.ready
            assert not waits.done()
            opened.set()
            np.testing.assert_array_equal(await waits, small.encode("two"))
            assert engine.ready

    run(main)


def test_a_backend_that_fails_on_everything_is_replaced(small: Engine, fakes: list[FakeBackend]) -> None:
    def broken(vectors: Vectors) -> None:
        raise RuntimeError("CUDA error 700")

    fakes[0].fault = broken

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            with pytest.raises(WorkerError, match="CUDA error 700"):
                await engine.encode(list(TEXTS))
            np.testing.assert_array_equal(await engine.encode(list(TEXTS)), small.encode(list(TEXTS)))

    run(main)


def test_if_the_model_does_not_open_again_calls_fail_until_it_does(
    small: Engine, fakes: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, allowed = small.replace_backend, threading.Event()

    def reopen() -> Any:
        if not allowed.is_set():
            raise EngineError("no such file")
        return replace()

    monkeypatch.setattr(small, "replace_backend", reopen)
    gate = Gate()

    def hang_up(vectors: Vectors) -> None:
        gate(vectors)
        raise SystemExit

    fakes[0].fault = hang_up

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            running = [asyncio.ensure_future(engine.encode(text)) for text in TEXTS[:2]]
            await gate.wait_for(2)
            queued = asyncio.ensure_future(engine.encode("queued"))
            await until(lambda: engine.stats().queued_texts == 1)
            gate.opened.set()
            for call in [*running, queued]:
                with pytest.raises(WorkerError):
                    await call
            with pytest.raises(WorkerError, match="can't be opened again: no such file; retry in"):
                await engine.encode("new")
            assert not engine.ready
            allowed.set()
            await until(lambda: engine.ready)
            np.testing.assert_array_equal(await engine.encode("new"), small.encode("new"))

    run(main)


def test_a_batch_that_ends_after_its_backend_was_replaced_holds_up_nobody(
    small: Engine, fakes: list[FakeBackend]
) -> None:
    slow, held, runs = Gate(), Gate(), count()

    def slow_then_dead(vectors: Vectors) -> None:
        if next(runs):
            raise SystemExit
        slow(vectors)

    fakes[0].fault = slow_then_dead

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            old = asyncio.ensure_future(engine.encode(TEXTS[0]))
            await slow.wait_for(1)
            with pytest.raises(WorkerError, match="died"):
                await engine.encode(TEXTS[1])
            await until(lambda: engine.ready)
            fakes[1].fault = held
            first = asyncio.ensure_future(engine.encode(TEXTS[2]))
            await held.wait_for(1)  # together with the old batch, that is all that may run
            others = [asyncio.ensure_future(engine.encode(text)) for text in TEXTS]
            await asyncio.sleep(0.1)
            assert engine.stats().running_batches == 2
            slow.opened.set()
            held.opened.set()
            assert len(await asyncio.gather(old, first, *others)) == 2 + len(TEXTS)

    run(main)


def test_after_too_many_hung_workers_only_a_new_process_helps(
    small: Engine, fakes: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbert_infer.scheduling.workers._MAX_HUNG", 1)
    gate = fakes[0].fault = Gate()

    async def main() -> None:
        async with AsyncEngine(small, hang_timeout_s=0.1) as engine:
            with pytest.raises(WorkerError, match="hung"):
                await engine.encode("one")
            await until(lambda: bool(engine._queue.workers.problem))
            with pytest.raises(WorkerError, match="1 workers hang and keep their memory: restart the process"):
                await engine.encode("two")
            assert not engine.ready
            assert len(fakes) == 1
            gate.opened.set()

    run(main)


def test_another_model_in_the_same_file_is_not_opened(small: Engine, export_checkpoint: Callable[..., Path]) -> None:
    other = export_checkpoint("bert")
    small.artifact = type(small.artifact)(other, small.manifest, small.artifact.tokenizer_json)
    with pytest.raises(EngineError, match="is another model than the one that was opened"):
        small.replace_backend()
