"""The length limit: truncation of longer texts, changing the limit, and the statistics."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import EncodeStats, Engine, SbertInferWarning, TruncationError
from tests.models.checkpoints import TEXTS

LONG = " ".join(TEXTS)  # far over the small model's 64 tokens


def test_by_default_one_warning_with_the_count(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 2)
    with pytest.warns(SbertInferWarning) as caught:
        small.encode([LONG, "short", LONG, LONG + "!"])
    assert [str(warning.message) for warning in caught] == [
        "3 of 4 texts were cut to 64 tokens; see Engine(on_truncate=...)"
    ]
    assert caught[0].filename == __file__
    with pytest.warns(SbertInferWarning) as caught:
        small.encode_document(LONG)
    assert caught[0].filename == __file__


def test_a_text_of_exactly_the_limit_is_not_cut(small: Engine) -> None:
    word = next(word for word in ("a", "the", "in") if len(small.tokenizer.encode(word)) == 3)
    fits = " ".join([word] * 62)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.encode(fits, prompt="")
    assert small.last_stats.tokens == 64
    with pytest.warns(SbertInferWarning, match="1 of 1 texts"):
        small.encode(f"{fits} {word}", prompt="")


def test_the_prompt_counts(small: Engine) -> None:
    with pytest.warns(SbertInferWarning, match="1 of 1 texts"):
        small.encode("short", prompt=LONG)


def test_error(small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 2)
    with Engine(small_onnx, on_truncate="error") as engine:
        with pytest.raises(TruncationError, match="text 3 has more than 64 tokens"):
            engine.encode(["a", "b", "c", LONG, "d", "e"])
        assert engine.encode(["fine"]).shape == (1, 24)


def test_ignore(small_onnx: Path) -> None:
    with Engine(small_onnx, on_truncate="ignore") as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.encode([LONG, "short"])
        assert engine.last_stats.truncated == 1


def test_last_stats(small_onnx: Path) -> None:
    texts = ["", "a", LONG, "a", "", LONG, TEXTS[0]]
    with Engine(small_onnx, on_truncate="ignore", max_batch_tokens=64) as engine:
        assert engine.last_stats == EncodeStats()
        engine.encode(texts, prompt="")
        stats = engine.last_stats
        lengths = [len(engine.tokenizer.encode(text, truncation=True)) for text in ("", "a", LONG, TEXTS[0])]
    assert (stats.texts, stats.unique_texts, stats.truncated) == (7, 4, 2)
    assert lengths[2] == 64
    assert stats.tokens == sum(lengths)
    assert stats.padded_tokens >= stats.tokens
    assert stats.padding == 1 - stats.tokens / stats.padded_tokens
    assert stats.batches >= 2  # the long text fills one of them


def test_a_failed_call_leaves_the_statistics(small: Engine) -> None:
    small.encode(TEXTS)
    before = small.last_stats
    with pytest.raises(TypeError):
        small.encode(["fine", 1])  # type: ignore[list-item]
    assert small.last_stats is before


def test_a_lower_limit(small_onnx: Path, small_reference: Any) -> None:
    texts = [*TEXTS, LONG, ""]
    before = small_reference.max_seq_length
    with Engine(small_onnx, on_truncate="ignore") as engine:
        assert engine.max_seq_length == engine.get_max_seq_length() == before == 64
        whole = engine.encode(texts)
        for limit in (16, 5):
            engine.max_seq_length = small_reference.max_seq_length = limit
            try:
                expected = small_reference.encode(texts, prompt="")
            finally:
                small_reference.max_seq_length = before
            np.testing.assert_allclose(engine.encode(texts, prompt=""), expected, atol=2e-5, rtol=0)
            assert engine.info["max_length"] == engine.max_seq_length == limit
        engine.max_seq_length = 64
        np.testing.assert_array_equal(engine.encode(texts), whole)


@pytest.mark.parametrize("limit", [65, 0, 2, -1])
def test_a_limit_the_model_does_not_have(limit: int, small: Engine) -> None:
    with pytest.raises(ValueError, match=f"between 3 and the model's limit of 64, got {limit}"):
        small.max_seq_length = limit
    assert small.max_seq_length == 64


def test_the_limit_can_be_raised_to_the_positions(minilm_onnx: Path, minilm: Any) -> None:
    texts = [("a cat sat, " * 200)[:size] for size in (50, 900, 1200, 1300, 2100)]  # only the last is too long
    with Engine(minilm_onnx, on_truncate="ignore") as engine:
        before = engine.encode(texts)
        assert (engine.max_seq_length, engine.manifest.max_positions) == (256, 512)
        engine.max_seq_length = minilm.max_seq_length = 512
        try:
            np.testing.assert_allclose(engine.encode(texts), minilm.encode(texts), atol=1e-5)
        finally:
            minilm.max_seq_length = 256
        assert engine.last_stats.truncated == 1
        assert len(engine.tokenizer(texts[-1], truncation=True).input_ids) == 512
        with pytest.raises(ValueError, match="between 3 and the model's limit of 512, got 513"):
            engine.max_seq_length = 513
        engine.max_seq_length = 256
        assert np.array_equal(engine.encode(texts), before)
