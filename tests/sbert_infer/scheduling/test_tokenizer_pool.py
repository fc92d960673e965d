"""Tokenizing outside the event loop: nobody holds up interactive calls, and callers take turns."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from sbert_infer import AsyncEngine, Engine
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.scheduling.call import CallOptions
from sbert_infer.scheduling.tokenizer_pool import TokenizerPool
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer
from sbert_infer.types import BULK, INTERACTIVE, Priority, Text
from tests.doubles.backend import FakeBackend, run


class Watched:
    """Notes the pieces that are tokenized, and blocks on those that begin with "wait"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[int] = []
        self.may_go = threading.Event()
        tokenize = Tokenizer.__call__

        def watched(tokenizer: Tokenizer, texts: Sequence[Text]) -> TokenizedTexts:
            self.pieces.append(len(texts))
            assert not str(texts[0]).startswith("wait") or self.may_go.wait(timeout=30)
            return tokenize(tokenizer, texts)

        monkeypatch.setattr(Tokenizer, "__call__", watched)


def options(engine: Engine, priority: Priority) -> CallOptions:
    return CallOptions("", DenseOutput(engine.manifest), "ignore", math.inf, priority=priority)


def pool(engine: Engine) -> TokenizerPool:
    return TokenizerPool(engine.pipeline, engine.tokenizer_of_other_side, include_prompt=True)


def test_bulk_does_not_keep_interactive_texts_from_being_tokenized(
    small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, threads = Watched(monkeypatch), pool(small)

    async def main() -> None:
        bulk = [asyncio.ensure_future(threads.tokenize(["wait"], options(small, BULK))) for _ in range(4)]
        tokenized, _ = await asyncio.wait_for(threads.tokenize(["a cat"], options(small, INTERACTIVE)), 20)
        assert len(tokenized.lengths) == 1
        assert not any(call.done() for call in bulk)
        watched.may_go.set()
        await asyncio.gather(*bulk)
        await asyncio.to_thread(threads.close)

    run(main)


@pytest.mark.parametrize(
    ("texts", "pieces"),
    [(["a cat"] * 150, [64, 64, 22]), ([" " * 30_000] * 5, [2, 2, 1]), (["a " * 50_000, "a", "b"], [1, 2])],
)
def test_a_piece_has_few_texts_and_few_characters(
    texts: list[str], pieces: list[int], small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = small.pipeline.tokenizer(texts)
    watched, threads = Watched(monkeypatch), pool(small)

    async def main() -> None:
        tokenized, _ = await threads.tokenize(texts, options(small, BULK))
        await asyncio.to_thread(threads.close)
        assert watched.pieces == pieces
        np.testing.assert_array_equal(tokenized.ids, expected.ids)
        np.testing.assert_array_equal(tokenized.truncated, expected.truncated)

    run(main)


def test_a_long_text_is_bulk_though_it_is_cut(small: Engine, fakes: list[FakeBackend]) -> None:
    """It takes long to tokenize, whatever is left of it."""
    seen: list[str] = []

    async def main() -> None:
        async with AsyncEngine(small, observe=lambda name, _: seen.append(name)) as engine:
            await engine.encode(" " * 100_000, on_truncate="ignore")
            await engine.encode_tokens([[5] * 1000], on_truncate="ignore")
            await engine.encode("a cat")
            await engine.encode_tokens([[5] * 10])

    run(main)
    assert [name for name in seen if name in (INTERACTIVE, BULK)] == [BULK, BULK, INTERACTIVE, INTERACTIVE]
