"""Fixtures of the tests of `sbert-embed`: a small model, and rows to embed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import Engine
from tests.models.checkpoints import TEXTS

WORDS = " ".join(TEXTS).split()


@pytest.fixture(scope="session")
def small_onnx(export_checkpoint: Callable[..., Path]) -> Path:
    """A small artifact, its vectors not normalized. Shared: change only a copy."""
    return export_checkpoint("bert", prompts={"query": "find this: "}, include_prompt=False, normalize=False)


@pytest.fixture(scope="session")
def encode(small_onnx: Path) -> Any:
    """`Engine.encode` of the small model: the vectors that `sbert-embed` must write exactly."""
    return Engine(small_onnx, on_truncate="ignore").encode


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 12 words, some of them twice, and one far over the model's limit."""
    rng = random.Random(seed)  # noqa: S311
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(count)]
    texts[count // 2] = " ".join(WORDS * 3)
    return texts
