"""Every artifact carries texts with the eager model's vectors, in few bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer import CorruptError
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.canaries import Canaries, canaries_of
from sbert_infer.export.verify.canaries import MOST_BYTES, choose_canaries


def through_json(canaries: Canaries) -> Canaries:
    return Canaries.from_json(json.loads(json.dumps(canaries.to_json())))


@given(
    st.lists(
        st.tuples(st.text(), st.integers(1, 5), st.floats(1e-6, 1e6), st.sampled_from([0.0, 0.9])),
        min_size=1,
        max_size=6,
    )
)
def test_they_survive_the_manifest(rows: list[tuple[str, int, float, float]]) -> None:
    random, scale = np.random.default_rng(0), rows[0][2]
    results = []
    for _, count, _, zeros in rows:
        values = random.standard_normal((count, 8)) * (random.random((count, 8)) >= zeros)
        results.append((values * scale).astype(np.float32))
    kept = through_json(Canaries([text for text, *_ in rows], results, [None] * len(rows)))
    assert list(kept.texts) == [text for text, *_ in rows]
    for ours, right in zip(kept.results, results, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-6 * np.abs(np.concatenate(results)).max(initial=0))


def test_pairs_and_tasks_survive() -> None:
    pairs = Canaries([("a", "b"), ("c", "d")], [np.ones((1, 1), np.float32)] * 2)
    assert list(through_json(pairs).texts) == [("a", "b"), ("c", "d")]
    roles = Canaries(["a", "b"], [np.ones((3, 2), np.float32), np.ones((1, 2), np.float32)], ["query", None])
    assert list(through_json(roles).tasks) == ["query", None]
    assert [result.shape for result in through_json(roles).results] == [(3, 2), (1, 2)]


@pytest.mark.parametrize("dim", [1, 384, 1024, 4096, 10_000])
def test_long_vectors_have_fewer_texts(dim: int) -> None:
    texts = [f"text {number} {'п' * (number % 2) * 20}" for number in range(100)]
    vectors = np.random.default_rng(0).standard_normal((100, 1, dim)).astype(np.float32)
    entries = choose_canaries(texts, [4 + number % 30 for number in range(100)], vectors)
    assert entries is not None
    assert len(json.dumps(entries)) <= MOST_BYTES < 100_000
    assert len(entries["texts"]) == (32 if dim <= 1024 else min(32, len(entries["texts"])))
    assert len(entries["texts"]) >= 3
    assert any(not text.isascii() for text in entries["texts"])


def test_vectors_that_do_not_fit_give_none() -> None:
    assert choose_canaries(["a"], [3], np.ones((1, 1, 100_000), np.float32)) is None
    assert choose_canaries([], [], []) is None


def test_exports_have_them(export_checkpoint: Callable[..., Path], reranker_onnx: Path) -> None:
    for path in (*(export_checkpoint("bert", **how) for how in ({}, {"int8": True}, {"fp16": True})), reranker_onnx):
        artifact = open_artifact(path)
        canaries = canaries_of(artifact)
        assert canaries is not None
        assert len(json.dumps(artifact.manifest.canaries)) < 100_000
        assert 24 <= len(canaries.texts) <= 32
        words = " ".join(text if isinstance(text, str) else " ".join(text) for text in canaries.texts)
        assert any("\u0400" <= character <= "\u04ff" for character in words)  # Cyrillic, among others


@pytest.mark.parametrize(
    "damage",
    [{"values": "AAA"}, {"values": ""}, {"shapes": [[1]]}, {"texts": ["a"]}, {"scale": None}, {"places": "AAAA"}],
)
def test_damaged_ones_are_refused(small_onnx: Path, damage: dict[str, Any]) -> None:
    artifact = open_artifact(small_onnx)
    entries = {**(artifact.manifest.canaries or {}), **damage}
    with pytest.raises(CorruptError, match="canaries"):
        canaries_of(replace(artifact, manifest=replace(artifact.manifest, canaries=entries)))


def test_an_older_artifact_has_none(small_onnx: Path) -> None:
    artifact = open_artifact(small_onnx)
    older = replace(artifact.manifest, canaries=None)
    assert "canaries" not in json.loads(older.to_json())
    assert canaries_of(replace(artifact, manifest=older)) is None
