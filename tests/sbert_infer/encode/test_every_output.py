"""What every kind of output has in common: duplicates, statistics and truncation."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import AsyncEngine, CallTooLargeError, Engine, EngineError, Reranker, TruncationError
from sbert_infer.base_engine import BaseEngine
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families import family
from tests.models.checkpoints import TEXTS
from tests.models.cross_encoders import write_cross_encoder
from tests.models.multi_vectors import FIXED, export_multi_vector
from tests.models.sparse_encoders import splade_onnx

KINDS = ("dense", "sparse", "tokens", "multi-vector", "pairs")
LONG = "one word after another " * 200


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(kind: str, once: Callable[..., Path], make_checkpoint: Callable[..., Path], small_onnx: Path) -> Path:
    """An artifact that gives this kind of output. Its parity is checked by other tests."""

    def write_tokens(target: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(family, "probe_texts", lambda *_: list(TEXTS))
            export(make_checkpoint("bert"), target, ExportOptions(outputs=("sentence", "tokens")))

    def write_reranker(target: Path) -> None:
        export(write_cross_encoder(target.with_suffix(""), "bert"), target)

    makers: dict[str, Callable[[], Path]] = {
        "dense": lambda: small_onnx,
        "sparse": lambda: splade_onnx(once),
        "tokens": lambda: once("tokens of every output", "tokens.onnx", write_tokens),
        "multi-vector": lambda: export_multi_vector(once, **FIXED)[1],
        "pairs": lambda: once("reranker of every output", "reranker.onnx", write_reranker),
    }
    return makers[kind]()


def opened(path: Path, kind: str, **options: Any) -> BaseEngine:
    return Reranker(path, **options) if kind == "pairs" else Engine(path, **options)


def encode(engine: BaseEngine, texts: list[str], kind: str) -> list[Any]:
    """Return one array for each text."""
    if isinstance(engine, Reranker):
        return list(engine.predict([(text, text) for text in texts]))
    assert isinstance(engine, Engine)
    if kind == "sparse":
        rows: Any = engine.encode(texts)
        return list(rows.toarray())
    return list(engine.encode(texts, output_value="token_embeddings" if kind == "tokens" else "sentence_embedding"))


def test_identical_texts_run_once_and_are_counted(path: Path, kind: str) -> None:
    texts = [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2], TEXTS[0]]
    with opened(path, kind, on_truncate="ignore") as engine:
        found = encode(engine, texts, kind)
        stats = engine.last_stats
        alone = [encode(engine, [text], kind)[0] for text in texts]
    assert (stats.texts, stats.unique_texts, stats.truncated) == (5, 3, 0)
    assert 0 < stats.tokens <= stats.padded_tokens
    assert stats.batches >= 1
    for ours, right in zip(found, alone, strict=True):
        np.testing.assert_allclose(ours, right, rtol=0, atol=1e-5)


def test_results_of_identical_texts_are_not_the_same_memory(path: Path, kind: str) -> None:
    with opened(path, kind, on_truncate="ignore") as engine:
        first, _, again = encode(engine, [TEXTS[0], TEXTS[1], TEXTS[0]], kind)
    assert not np.shares_memory(first, again)


def test_truncation_is_counted_warned_of_or_refused(path: Path, kind: str) -> None:
    texts = [TEXTS[0], LONG, TEXTS[0], LONG]
    with opened(path, kind) as engine:
        with pytest.warns(UserWarning, match=r"2 of 4 (texts|pairs) were cut to \d+ tokens; see \w+\(on_truncate"):
            encode(engine, texts, kind)
        assert engine.last_stats.truncated == 2
    with opened(path, kind, on_truncate="error") as engine:
        with pytest.raises(TruncationError, match=r"(text|pair) 1 has more than \d+ tokens") as caught:
            encode(engine, texts, kind)
        assert caught.value.index == 1
        assert 0 < caught.value.limit <= engine.max_seq_length
        assert caught.value.texts == 2


@pytest.mark.parametrize("count", [0, 7])
def test_windows(path: Path, kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 3)
    texts = [f"{TEXTS[0]} {number}" for number in range(count)]
    with opened(path, kind, on_truncate="ignore") as engine:
        found = encode(engine, texts, kind)
        assert engine.last_stats.texts == len(found) == count
        monkeypatch.undo()
        for ours, right in zip(found, encode(engine, texts, kind), strict=True):
            np.testing.assert_allclose(ours, right, rtol=0, atol=1e-5)


def test_closing_during_a_call_ends_it(path: Path, kind: str) -> None:
    """The batches that were waiting are cancelled, and the call says why."""
    engine = opened(path, kind, on_truncate="ignore", workers=1, max_batch_tokens=16)
    run, entered, go_on = engine.pipeline.backend.run, threading.Event(), threading.Event()

    def held_up(*args: Any, **options: Any) -> Any:
        entered.set()
        assert go_on.wait(timeout=30)
        return run(*args, **options)

    engine.pipeline.backend.run = held_up  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(encode, engine, [f"{TEXTS[0]} {number}" for number in range(50)], kind)
        assert entered.wait(timeout=30)
        closing = pool.submit(engine.close)
        until_closed(engine)
        go_on.set()
        with pytest.raises(EngineError, match="the engine was closed during this call"):
            call.result(timeout=30)
        closing.result(timeout=30)


def until_closed(engine: BaseEngine) -> None:
    while "closed" not in repr(engine):
        time.sleep(0.001)


@pytest.mark.parametrize("kind", ["tokens"], indirect=True)
def test_token_vectors_are_bounded_by_what_is_returned(path: Path) -> None:
    """Duplicates run once, but each of them is returned."""

    async def main() -> None:
        async with AsyncEngine(path) as engine:
            tokens = (await engine.token_vectors([TEXTS[0]])).tokens
            found = await engine.token_vectors([TEXTS[0]] * 4, max_tokens=4 * tokens)
            assert found.tokens == 4 * tokens
            with pytest.raises(CallTooLargeError, match=f"the texts have {4 * tokens} tokens, at most") as caught:
                await engine.token_vectors([TEXTS[0]] * 4, max_tokens=4 * tokens - 1)
            assert caught.value.limit == 4 * tokens - 1

    asyncio.run(main())
