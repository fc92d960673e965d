"""Engines on a backend that takes packed rows: the same vectors as with padding, and less waste."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from sbert_infer import AsyncEngine, Engine, TextError
from sbert_infer.backends.base import Batch
from sbert_infer.types import Shape
from tests.doubles.backend import FakeBackend, PackingBackend, Vectors
from tests.models.checkpoints import ODD_TEXTS, TEXTS

SHAPES = (Shape(1, 16, 4), Shape(1, 64, 16), Shape(4, 64, 16))
LONG = "one word after another " * 60
ALL_TEXTS = [*TEXTS, *ODD_TEXTS, LONG, *TEXTS[:3]]


@pytest.fixture
def padded(small: Engine) -> Vectors:
    """Return the vectors of all texts, with padding."""
    use(small, FakeBackend())
    return encode(small)


def use(engine: Engine, backend: FakeBackend) -> None:
    engine.pipeline.backend.close()
    engine.pipeline.backend = backend


def encode(engine: Engine, batch_size: int | None = None) -> Vectors:
    engine.on_truncate = "ignore"
    vectors: Vectors = engine.encode(ALL_TEXTS, prompt="", batch_size=batch_size)
    return vectors


def test_the_same_vectors_in_the_same_order(small: Engine, padded: Vectors) -> None:
    use(small, PackingBackend(*SHAPES))
    np.testing.assert_array_equal(encode(small), padded)
    for batch_size in (1, 3):
        np.testing.assert_array_equal(encode(small, batch_size=batch_size), padded)


def test_all_that_runs_is_counted(small: Engine) -> None:
    backend = PackingBackend(*SHAPES)
    use(small, backend)
    encode(small)
    stats = small.last_stats
    assert stats.padded_tokens == sum(rows * length for rows, length in backend.shapes)
    assert stats.batches == len(backend.shapes)
    assert 0 < stats.padding < 0.3


def test_a_lone_text_runs_in_the_smallest_shape(small: Engine) -> None:
    backend = PackingBackend(*SHAPES)
    use(small, backend)
    small.encode("a text", prompt="")
    assert backend.shapes == [(1, 16)]


def test_a_prompt_is_left_out_of_pooling(small: Engine) -> None:
    """The model of `small` leaves its prompts out; the fake's vectors depend on what is pooled."""
    backend = PackingBackend(*SHAPES)
    use(small, backend)
    tokenizer, prompt, text = small.pipeline.tokenizer, small.prompts["query"], TEXTS[0]
    ids = tokenizer([prompt + text]).ids
    pooled = np.arange(len(ids)) >= tokenizer.prompt_length(prompt)
    total = (ids * np.arange(1, len(ids) + 1))[pooled].sum()
    expected = np.sin(total + np.arange(32)).astype(np.float32)
    np.testing.assert_array_equal(small.encode(text, prompt=prompt), expected[: small.truncate_dim])


class SpoiledRows(PackingBackend):
    """A text spoils all that share its row, as NaN does in a product with zeros."""

    def __init__(self, culprit: Vectors) -> None:
        super().__init__(*SHAPES)
        self.culprit = culprit

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Vectors]:
        assert batch.packing is not None
        (vectors,) = super().run(batch, outputs)
        rows = batch.packing.texts // batch.packing.starts.shape[1]
        bad = rows[(vectors == self.culprit).all(axis=1)]
        vectors[np.isin(rows, bad)] = np.nan
        return [vectors]


def test_the_text_to_blame_is_named_not_its_neighbours(small: Engine) -> None:
    use(small, PackingBackend(*SHAPES))
    texts = [f"{word} text" for word in ("first", "second", "third", "fourth")]
    small.truncate_dim = None
    use(small, SpoiledRows(small.encode(texts[2], prompt="")))
    with pytest.raises(TextError, match=r"NaN or infinity for text 2 \(1 in all\)") as caught:
        small.encode(texts, prompt="")
    assert caught.value.index == 2


class SpoiledOnce(SpoiledRows):
    """The same, but a text that runs alone spoils nothing."""

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Vectors]:
        assert batch.packing is not None
        run = super().run if len(batch.packing.texts) > 1 else super(SpoiledRows, self).run
        return run(batch, outputs)


def test_texts_that_run_again_are_counted(small: Engine) -> None:
    texts = [f"{word} text" for word in ("first", "second", "third", "fourth")]
    small.truncate_dim = None
    use(small, PackingBackend(*SHAPES))
    right = small.encode(texts, prompt="")
    backend = SpoiledOnce(right[2])
    use(small, backend)
    np.testing.assert_array_equal(small.encode(texts, prompt=""), right)
    assert len(backend.shapes) > 1
    assert small.last_stats.batches == len(backend.shapes)
    assert small.last_stats.padded_tokens == sum(rows * length for rows, length in backend.shapes)


def test_many_callers(small: Engine, padded: Vectors) -> None:
    backend = PackingBackend(*SHAPES)
    use(small, backend)

    async def main() -> None:
        async with AsyncEngine(small) as engine:
            calls = [engine.encode(text, prompt="", on_truncate="ignore") for text in ALL_TEXTS]
            np.testing.assert_array_equal(np.stack(await asyncio.gather(*calls)), padded)
            together = await engine.encode(ALL_TEXTS, prompt="", on_truncate="ignore")
            np.testing.assert_array_equal(together, padded)
            assert engine.stats().padded_tokens == sum(rows * length for rows, length in backend.shapes)

    asyncio.run(main())
