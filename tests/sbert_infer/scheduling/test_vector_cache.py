"""The cache of sentence vectors: which texts run, what hits return, and how large it grows."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer import AsyncEngine, Engine, TextError, TruncationError
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import Manifest
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.scheduling.call import CallOptions
from sbert_infer.scheduling.stats import CallCounts
from sbert_infer.scheduling.vector_cache import VectorCache
from sbert_infer.text.tokenizer import TokenizedTexts
from sbert_infer.types import Encoded, Text
from tests.doubles.backend import FakeBackend, Vectors, run
from tests.models.checkpoints import TEXTS

DIM, LIMIT = 32, 3
ENTRY_MB = (DIM * 4 + 330) / 2**20


@pytest.fixture(scope="module")
def manifest(small_onnx: Path) -> Manifest:
    return replace(open_artifact(small_onnx).manifest, dim=DIM)


class Runner:
    """Encodes texts to numbers of their own; those of more than `LIMIT` characters are cut."""

    def __init__(self) -> None:
        self.ran: list[Text] = []

    async def __call__(self, texts: list[Text], options: CallOptions, arrival: float) -> Encoded:
        self.ran += texts
        lengths = np.array([min(len(text), LIMIT) for text in texts])
        truncated = np.array([len(text) > LIMIT for text in texts])
        if options.on_truncate == "error" and truncated.any():
            raise TruncationError(int(np.flatnonzero(truncated)[0]), LIMIT)
        tokenized = TokenizedTexts(np.zeros(lengths.sum(), np.int64), np.cumsum(lengths) - lengths, lengths, truncated)
        collector = options.output.collect(tokenized)
        seeds = [f"{options.prompt}|{text}|{options.other_side}".encode() for text in texts]
        rows = [np.random.default_rng(list(seed)).standard_normal(DIM, np.float32) for seed in seeds]
        collector.put(np.arange(len(texts)), [np.stack(rows)])
        return Encoded(collector.result(None), tokenized.tokens(), tokenized.cut())


calls = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["", "a", "b", "ab", "abc", "abcd", "abce", "ü"]), min_size=1, max_size=6),
        st.sampled_from(["", "a", "query: "]),
        st.booleans(),  # the other side
        st.booleans(),  # unit length
        st.sampled_from([None, 5]),
        st.sampled_from(["ignore", "error"]),
    ),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(calls, st.integers(1, 6))
def test_calls_get_what_they_would_without_it(manifest: Manifest, calls: list[tuple], capacity: int) -> None:  # type: ignore[type-arg]
    """Also, only texts run that are not among the most recently used ones."""
    cache, counts = VectorCache(capacity * ENTRY_MB, manifest), CallCounts(lambda name, value: None)
    recent: OrderedDict[object, None] = OrderedDict()

    async def main() -> None:
        for texts, prompt, other_side, normalize, dim, on_truncate in calls:
            output = DenseOutput(manifest, dim, normalize=normalize)
            options = CallOptions(prompt, output, on_truncate, np.inf, other_side)
            cached, plain = Runner(), Runner()
            if on_truncate == "error" and max(map(len, texts)) > LIMIT:
                with pytest.raises(TruncationError) as wanted:
                    await plain(list(texts), options, 0.0)
                with pytest.raises(TruncationError) as found:
                    await cache.encode(cached, counts, 9, list(texts), options, 0.0)
                assert str(found.value) == str(wanted.value)
                for text in texts:
                    if len(text) <= LIMIT and (text, prompt, other_side) in recent:
                        recent.move_to_end((text, prompt, other_side))
                continue
            expected = await plain(list(texts), options, 0.0)
            encoded = await cache.encode(cached, counts, 9, list(texts), options, 0.0)
            np.testing.assert_array_equal(encoded.vectors, expected.vectors)
            assert encoded[1:] == expected[1:]
            keys = [(text, prompt, other_side) for text in texts]
            missing = [key for key in keys if key not in recent]
            assert cached.ran == [text for text, *_ in missing]
            for key in keys:
                if key in recent:
                    recent.move_to_end(key)
            for key in missing:
                recent.setdefault(key)
                while len(recent) > capacity:
                    recent.popitem(last=False)
            assert len(cache) == len(recent)
            assert cache.size <= capacity * ENTRY_MB * 2**20

    asyncio.run(main())


def test_a_cache_without_room_is_refused(manifest: Manifest, small: Engine) -> None:
    with pytest.raises(ValueError, match="room for one vector"):
        VectorCache(ENTRY_MB / 2, manifest)
    with pytest.raises(ValueError, match="cache_mb must be at least 0, got -1"):
        AsyncEngine(small, cache_mb=-1)


def test_a_hit_has_the_bits_of_the_run_that_made_it(small: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(small, cache_mb=1) as engine:
            first = await engine.encode_counted(TEXTS, prompt="")
            batches = engine.stats().batches
            again = await engine.encode_counted([*TEXTS[::-1], TEXTS[0]], prompt="")
            np.testing.assert_array_equal(again.vectors, first.vectors[[*range(len(TEXTS))[::-1], 0]])
            unit = await engine.encode(TEXTS[1], prompt="", normalize_embeddings=True, truncate_dim=7)
            cut = first.vectors[1:2, :7]
            np.testing.assert_array_equal(unit, (cut / np.linalg.norm(cut, axis=1, keepdims=True))[0])
            stats = engine.stats()
            assert (stats.batches, stats.cache_hits, stats.cache_misses) == (batches, len(TEXTS) + 2, len(TEXTS))
            assert (await engine.encode_counted(TEXTS, prompt="")).tokens == first.tokens
            await engine.encode(TEXTS[0], prompt_name="query")
            assert engine.stats().cache_misses == len(TEXTS) + 1

    run(main)


def test_a_changed_limit_gives_other_vectors(small: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(small, cache_mb=1) as engine:
            text = "one two three four five six seven eight nine"
            long = await engine.encode_counted(text, prompt="", on_truncate="error")
            small.max_seq_length = 4
            short = await engine.encode_counted(text, prompt="", on_truncate="ignore")
            assert (long.truncated, short.truncated, short.tokens) == (0, 1, 4)
            with pytest.raises(TruncationError, match="text 1 has more than 4 tokens"):
                await engine.encode(["a", text], prompt="", on_truncate="error")
            hits = engine.stats().cache_hits
            assert (await engine.encode_counted(text, prompt="", on_truncate="ignore")).truncated == 1
            assert engine.stats().cache_hits == hits + 1

    run(main)


def test_an_error_names_the_text_by_its_place_in_the_call(small: Engine, fakes: list[FakeBackend]) -> None:
    async def main() -> None:
        async with AsyncEngine(small, cache_mb=1) as engine:
            await engine.encode(["fine", "good"])
            bad = (await engine.encode(["poison"]))[0][0]
            engine.cache = VectorCache(1, small.manifest)
            await engine.encode(["fine", "good"])

            def poison(vectors: Vectors) -> None:
                vectors[vectors[:, 0] == bad] = np.nan

            fakes[-1].fault = poison
            with pytest.raises(TextError, match="text 2: ") as error:
                await engine.encode(["fine", "good", "poison"])
            assert error.value.index == 2

    run(main)
