"""What was done differently is named, from the vectors alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine
from sbert_infer.similarity import unit_rows
from sbert_infer.verify.compare import Comparison, compare
from sbert_infer.verify.texts import SHORT, long_texts, over_limit
from sbert_infer.verify.truth import Made, Truth

Names = list[str]


def names(found: Comparison) -> Names:
    return [difference.what for difference in found.differences]


@pytest.fixture(scope="module")
def truth(engine: Engine) -> Truth:
    """The real MiniLM."""
    return Truth(engine, Made(""))


@pytest.fixture(scope="module")
def texts(truth: Truth) -> list[str]:
    return [*SHORT, *long_texts(truth.count_tokens, truth.limit)]


@pytest.fixture(scope="module")
def vectors(truth: Truth, texts: list[str]) -> Any:
    return truth.encode(texts)


def test_the_same_vectors_are_right(truth: Truth, texts: list[str], vectors: Any) -> None:
    noise = np.random.default_rng(0).standard_normal(vectors.shape) * 1e-5
    assert compare(truth, texts, vectors).differences == []
    assert compare(truth, texts, (vectors + noise).astype(np.float32)).differences == []


@pytest.mark.parametrize("pooling", ["cls", "max"])
def test_another_pooling(truth: Truth, texts: list[str], minilm: Any, pooling: str) -> None:
    tokens = [rows.cpu().numpy() for rows in minilm.encode(texts, output_value="token_embeddings")]
    pooled = [rows[0] if pooling == "cls" else rows.max(axis=0) for rows in tokens]
    assert names(compare(truth, texts, unit_rows(np.stack(pooled)))) == ["pooling"]


@pytest.mark.parametrize("limit", [64, 128, 130])
def test_another_limit(truth: Truth, texts: list[str], limit: int) -> None:
    (difference,) = compare(truth, texts, truth.encode(texts, limit=limit)).differences
    assert difference.what == "truncation"
    assert (f"cut to {limit} tokens" in difference.how) == (limit != 130)  # an unusual one is not tried
    assert "256" in difference.how


@pytest.mark.parametrize("limit", [128, 2048, 8192, 1_000_000])
def test_lengths_of_texts(truth: Truth, limit: int) -> None:
    counts = [truth.count_tokens(text) for text in long_texts(truth.count_tokens, limit)]
    longest = min(limit, 5000)
    assert longest - 30 < max(counts) <= longest
    assert len(counts) <= 8
    assert all(limit < truth.count_tokens(text) < 2 * limit for text in over_limit(truth.count_tokens, limit))


@pytest.mark.parametrize("cut", [2048, 4096])
def test_a_server_that_cuts_very_long_texts(export_checkpoint: Callable[..., Path], cut: int) -> None:
    with Engine(export_checkpoint("bert", max_length=4500), on_truncate="ignore") as engine:
        truth = Truth(engine, Made(""))
        texts = [*SHORT, *long_texts(truth.count_tokens, truth.limit)]
        (difference,) = compare(truth, texts, truth.encode(texts, limit=cut)).differences
    assert f"cut to {cut} tokens, where the model takes 4500" in difference.how


@pytest.mark.parametrize("prompt", ["query: ", "passage: "])
def test_a_well_known_prompt(truth: Truth, texts: list[str], prompt: str) -> None:
    (difference,) = compare(truth, texts, truth.encode(texts, prompt=prompt)).differences
    assert difference.what == "prompt"
    assert repr(prompt) in difference.how


def test_rounding(truth: Truth, texts: list[str], vectors: Any) -> None:
    steps = np.round(vectors * 60) / 60  # coarser than what 8-bit weights do
    found = compare(truth, texts, steps.astype(np.float32))
    assert names(found) == ["precision"]
    assert 0.97 < found.cosines.min() < found.cosines.max() < truth.bound


def test_another_model_or_other_texts(truth: Truth, texts: list[str], vectors: Any) -> None:
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((384, 384)))[0]
    assert names(compare(truth, texts, (vectors @ rotation).astype(np.float32))) == ["model"]
    assert names(compare(truth, texts, vectors[::-1].copy())) == ["model"]
    assert names(compare(truth, texts, np.concatenate([vectors, vectors], axis=1))) == ["model"]


def test_lengths_and_dimensions(truth: Truth, texts: list[str], vectors: Any) -> None:
    longer = compare(truth, texts, vectors * np.float32(3))
    assert names(longer) == ["normalisation"]
    assert "wrong: largest difference in length 2, at most 0.0" in str(longer.verdict)
    fewer = compare(truth, texts, vectors[:, :128].copy())
    assert names(fewer) == ["dimensions"]
    assert "wrong: numbers of a vector 128, exactly 384 is right" in str(fewer.verdict)
    scaled = compare(truth, texts, unit_rows(vectors[:, :128]))
    assert names(scaled) == ["dimensions", "normalisation"]


@pytest.fixture(scope="module")
def prompted(small_onnx: Path) -> Iterator[Engine]:
    """A model with prompts, which is not normalised."""
    with Engine(small_onnx, on_truncate="ignore") as engine:
        engine.truncate_dim = None
        yield engine


def test_the_prompts_of_the_model(prompted: Engine) -> None:
    truth = Truth(prompted, Made(prompted.resolve_prompt(None, None)))
    assert compare(truth, SHORT, prompted.encode(SHORT)).differences == []
    for prompt_name in ("query", "document"):
        (difference,) = compare(truth, SHORT, prompted.encode(SHORT, prompt_name=prompt_name)).differences
        assert difference.what == "prompt"
        assert repr(prompt_name) in difference.how
    (difference,) = compare(truth, SHORT, prompted.encode(SHORT, prompt="")).differences
    assert "no prompt" in difference.how


def test_scaling_of_vectors_that_are_not(prompted: Engine) -> None:
    truth = Truth(prompted, Made(""))
    found = prompted.encode(SHORT, prompt="", normalize_embeddings=True)
    (difference,) = compare(truth, SHORT, found).differences
    assert difference.what == "normalisation"
    assert "scaled to length 1" in difference.how
    assert compare(Truth(prompted, Made("", normalize=True)), SHORT, found).differences == []


def test_a_pooling_is_proven_with_token_vectors(
    once: Callable[..., Path], make_checkpoint: Callable[..., Path]
) -> None:
    from sbert_infer.export.exporter import ExportOptions, export

    options = ExportOptions(outputs=("sentence", "tokens"))
    path = once("verify tokens", "tokens.onnx", lambda target: export(make_checkpoint("bert"), target, options))
    with Engine(path, on_truncate="ignore") as engine:
        truth = Truth(engine, Made(""))
        cls = np.stack([rows[0] for rows in engine.token_vectors(SHORT)])
        (difference,) = compare(truth, SHORT, cls).differences
    assert difference.what == "pooling"
    assert "cls pooling, the model has mean" in difference.how
