"""`AsyncEngine` with many callers: with a real model, and with a fake one that blocks on demand."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from sbert_infer import (
    AsyncEngine,
    Engine,
    OverloadedError,
    SbertInferWarning,
    TruncationError,
)
from sbert_infer.scheduling.call import guess_tokens
from sbert_infer.text.tokenizer import Tokenizer
from tests.doubles.backend import FakeBackend, Gate, run, until
from tests.models.checkpoints import ODD_TEXTS, TEXTS

# The same vectors ---------------------------------------------------------------------------------


def test_vectors_are_those_of_the_engine(small: Engine) -> None:
    cases: list[dict[str, Any]] = [
        {"texts": TEXTS[0]},
        {"texts": list(TEXTS)},
        {"texts": np.array(TEXTS)},
        {"texts": (text for text in TEXTS)},
        {"texts": [*TEXTS, *TEXTS[::-1], "", ""]},
        {"texts": TEXTS, "prompt_name": "query"},
        {"texts": TEXTS, "prompt": ""},
        {"texts": TEXTS, "normalize_embeddings": True, "truncate_dim": 7},
        {"texts": list(ODD_TEXTS) * 20, "on_truncate": "ignore"},
        {"texts": []},
    ]

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            results = await asyncio.gather(*(engine.encode(**case) for case in cases[:3] + cases[4:]))
            results.insert(3, await engine.encode(**cases[3]))
        cases[3]["texts"] = TEXTS
        small.on_truncate = "ignore"
        for case, vectors in zip(cases, results, strict=True):
            case.pop("on_truncate", None)
            expected = small.encode(case.pop("texts"), **case)
            assert (vectors.shape, vectors.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(vectors, expected, atol=1e-6, rtol=0)

    run(main)


def test_every_caller_has_its_own_vectors(small: Engine, fakes: list[FakeBackend]) -> None:
    random = np.random.default_rng(0)
    words = " ".join(TEXTS).split()
    jobs = [
        [" ".join(random.choice(words, random.integers(1, 30))) for _ in range(random.choice([1, 1, 1, 3, 70]))]
        for _ in range(120)
    ]
    prompts = [str(random.choice(["query", "other", "document"])) for _ in jobs]
    expected = [small.encode(job, prompt_name=name) for job, name in zip(jobs, prompts, strict=True)]

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            calls = [engine.encode(job, prompt_name=name) for job, name in zip(jobs, prompts, strict=True)]
            for vectors, wanted in zip(await asyncio.gather(*calls), expected, strict=True):
                np.testing.assert_array_equal(vectors, wanted)
            assert engine.stats().batches < 0.5 * sum(map(len, jobs))

    run(main)


def test_token_ids_give_the_vectors_of_their_texts(small: Engine) -> None:
    texts = [*TEXTS, "long " * 500]
    ids = [small.tokenizer.encode(text, truncation=True) for text in texts]
    extra = [*ids[-1], 5, 6, 7]

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            expected = await engine.encode_counted(texts, prompt="", truncate_dim=8, on_truncate="ignore")
            found = await engine.encode_tokens([*ids[:-1], extra], truncate_dim=8, on_truncate="ignore")
            np.testing.assert_allclose(found.vectors, expected.vectors, atol=1e-6)
            assert (found.tokens, found.truncated) == (expected.tokens, 1)
            assert (await engine.encode_tokens([])).vectors.shape == (0,)
            with pytest.raises(TruncationError, match="text 1 "):
                await engine.encode_tokens([ids[0], extra], on_truncate="error")
            last = len(small.tokenizer) - 1
            await engine.encode_tokens([[last]])
            for bad, culprit in (([[1], []], "text 1 has no"), ([[1], [2, last + 1]], f"text 1: .* {last + 1}")):
                with pytest.raises(ValueError, match=culprit):
                    await engine.encode_tokens(bad)
            with pytest.raises(TypeError, match=r"text 0: .* True"):
                await engine.encode_tokens([[True]])

    run(main)


def test_a_wrong_argument_is_refused_as_by_the_engine(small: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(small) as engine:
            for arguments, error, message in (
                ({"texts": b"bytes"}, TypeError, "needs a str or an iterable"),
                ({"texts": ["a", 1]}, TypeError, "text 1 must be a str"),
                ({"texts": "a", "prompt_name": "none"}, ValueError, "not among the model's prompts"),
                ({"texts": "a", "truncate_dim": 0}, ValueError, "truncate_dim must be at least 1"),
                ({"texts": "a", "on_truncate": "no"}, ValueError, "on_truncate must be 'warn'"),
                ({"texts": "a", "timeout_s": 0}, ValueError, "timeout_s must be more than 0"),
            ):
                with pytest.raises(error, match=message):
                    await engine.encode(**arguments)

    run(main)
    for setting in ("timeout_s", "hang_timeout_s", "max_queue_tokens"):
        wrong: dict[str, Any] = {setting: -1}
        with pytest.raises(ValueError, match=f"{setting} must be more than 0, got -1"):
            AsyncEngine(small, **wrong)
    with pytest.raises(ValueError, match="max_batch_tokens must be 1 to 512"):
        AsyncEngine(small, max_batch_tokens=513)
    with pytest.raises(ValueError, match="an open engine has its workers: give them to Engine"):
        AsyncEngine(small, workers=1)


# Queueing and refusing ----------------------------------------------------------------------------


def test_texts_of_many_callers_run_together(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            first = [asyncio.ensure_future(engine.encode(text)) for text in TEXTS[:2]]
            await gate.wait_for(2)
            more = [asyncio.ensure_future(engine.encode(f"text {number}")) for number in range(20)]
            await until(lambda: engine.stats().queued_texts == 20)
            assert engine.stats().oldest_age_s > 0
            gate.opened.set()
            await asyncio.gather(*first, *more)
            assert max(fakes[0].seen) > 5

    run(main)


def test_a_guess_counts_no_text_for_more_than_the_limit() -> None:
    assert guess_tokens(["x" * 100_000, "a cat"], "", max_length=64) == 64 + 1 + 3
    assert guess_tokens(["a cat"], "sort these: ", max_length=64) == 1 + 3 + 3
    assert guess_tokens([("a cat", "a dog")], "", max_length=64) == 2 + 3


def test_an_observer_may_use_locks_of_its_own(small: Engine, fakes: list[FakeBackend]) -> None:
    lock, seen, done = threading.Lock(), [], threading.Event()

    def observe(name: str, value: float) -> None:
        with lock:
            seen.append(name)

    async def main() -> None:
        async with AsyncEngine(small, observe=observe) as engine:

            def export() -> None:
                while not done.is_set():
                    with lock:
                        engine.stats()

            thread = threading.Thread(target=export, daemon=True)
            thread.start()
            try:
                await asyncio.gather(*(engine.encode(f"text {number}") for number in range(200)))
            finally:
                done.set()
            await until(lambda: seen.count("tokenize") == seen.count("total") == 200)

    run(main)


def test_a_full_queue_refuses_at_once_and_takes_calls_again(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = fakes[0].fault = Gate()

    async def main() -> None:
        async with AsyncEngine(small, max_queue_tokens=300) as engine:
            first = [asyncio.ensure_future(engine.encode(text)) for text in TEXTS[:2]]
            await gate.wait_for(2)
            calls = [asyncio.ensure_future(engine.encode(f"{text} {n}")) for n in range(50) for text in TEXTS]
            await until(lambda: sum(call.done() for call in calls) > 400)
            assert 0 < engine.stats().queued_tokens <= 300
            gate.opened.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
            refused = [result for result in results if isinstance(result, BaseException)]
            assert {type(error) for error in refused} == {OverloadedError}
            assert 400 < len(refused) < len(calls)
            await asyncio.gather(*first)
            assert (await engine.encode(TEXTS[:6])).shape == (6, 24)
            with pytest.raises(ValueError, match="more than max_queue_tokens=300: send fewer at once"):
                await engine.encode([f"{text} {n}" for n in range(50) for text in TEXTS])

    run(main)


def test_a_query_does_not_wait_for_the_batches_of_bulk(small: Engine, fakes: list[FakeBackend]) -> None:
    gate = Gate()
    fakes[0].spare_workers = 1
    fakes[0].fault = lambda vectors: gate(vectors) if len(vectors) > 1 else None

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            bulk = asyncio.ensure_future(engine.encode([f"text {number}" for number in range(100)]))
            await gate.wait_for(2)
            assert (await engine.encode("a cat")).shape == (24,)
            waiting = engine.stats().lanes
            assert waiting["bulk"].queued_texts > 0 == waiting["interactive"].queued_texts
            beside = asyncio.ensure_future(engine.encode("a dog", priority="bulk"))
            await until(lambda: engine.stats().lanes["bulk"].queued_texts > waiting["bulk"].queued_texts)
            gate.opened.set()
            assert (await bulk).shape == (100, 24)
            await beside
            with pytest.raises(ValueError, match="priority must be 'interactive', 'bulk' or None, got 'urgent'"):
                await engine.encode("a cat", priority="urgent")  # type: ignore[arg-type]

    run(main)


def test_tokenizing_does_not_hold_up_the_event_loop(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize, ticked = Tokenizer.__call__, threading.Event()

    def wait_and_tokenize(tokenizer: Tokenizer, texts: Any) -> Any:
        assert ticked.wait(timeout=30)
        return tokenize(tokenizer, texts)

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            monkeypatch.setattr(Tokenizer, "__call__", wait_and_tokenize)
            call = asyncio.ensure_future(engine.encode("a " * 1000, on_truncate="ignore"))
            for _ in range(10):
                await asyncio.sleep(0.005)
            ticked.set()
            await call

    run(main)


def test_one_text_is_served_between_thousands(small: Engine, fakes: list[FakeBackend]) -> None:
    fakes[0].fault = lambda vectors: time.sleep(0.005)

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            large = asyncio.ensure_future(engine.encode([f"{text} {n}" for n in range(100) for text in TEXTS]))
            await until(lambda: engine.stats().batches > 5)
            for number in range(3):
                before = engine.stats().batches
                await engine.encode(f"small {number}")
                assert engine.stats().batches - before < 25
            assert not large.done()
            await large
            assert engine.stats().batches > 150

    run(main)


# Truncation and statistics ------------------------------------------------------------------------


def test_truncation(small: Engine) -> None:
    texts = ["short", " ".join(TEXTS), "short", " ".join(TEXTS)]

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            with pytest.raises(TruncationError, match="text 1 has more than 64 tokens"):
                await engine.encode(texts, on_truncate="error")
            with pytest.warns(SbertInferWarning, match="2 of 4 texts were cut to 64 tokens") as warned:
                encoded = await engine.encode_counted(texts)
            assert warned[0].filename == __file__
            assert encoded.truncated == 2
            short = len(small.tokenizer.encode("sort these by topic: short"))
            assert encoded.tokens == 2 * 64 + 2 * short
            await engine.encode(texts, on_truncate="ignore")
            assert engine.stats().truncated == 6

    run(main)


def test_statistics(small: Engine, fakes: list[FakeBackend]) -> None:
    observed: dict[str, list[float]] = {}

    def observe(name: str, value: float) -> None:
        observed.setdefault(name, []).append(value)
        if name == "queue":
            raise RuntimeError("a full disk")  # is logged, and breaks nothing

    async def main() -> None:
        async with AsyncEngine(small, observe=observe) as engine:
            encoded = await engine.encode_counted(list(TEXTS))
            again = await engine.encode_counted(TEXTS[0])
            stats = engine.stats()
        assert (stats.requests, stats.texts, stats.tokens) == (2, 13, encoded.tokens + again.tokens)
        assert stats.batch_tokens == stats.tokens <= stats.padded_tokens
        assert (stats.queued_texts, stats.queued_tokens, stats.running_batches, stats.oldest_age_s) == (0, 0, 0, 0)
        assert (stats.ready, stats.restarts, stats.errors) == (True, 0, {})
        assert stats.batches == len(fakes[0].seen) == len(observed["run"])
        assert sum(observed["batch_tokens"]) == stats.batch_tokens
        assert len(observed["total"]) == len(observed["tokenize"]) == 2
        assert all(0 <= value < 30 for values in (observed["total"], observed["queue"]) for value in values)

    run(main)
