"""Fixtures of the runtime's tests: engines, and the sentence-transformers models they must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import Engine

# A checkpoint in which every choice of prompts and dimensions shows in the vectors.
PROMPTED: dict[str, Any] = {
    "prompts": {"query": "find this: ", "document": "a text about ", "other": "sort these by topic: "},
    "default_prompt_name": "other",
    "include_prompt": False,
    "normalize": False,
    "similarity": "dot",
    "truncate_dim": 24,
}


@pytest.fixture(scope="session")
def engine(minilm_onnx: Path) -> Iterator[Engine]:
    """Real MiniLM. Shared: restore what you set."""
    with Engine(minilm_onnx, on_truncate="ignore") as engine:
        yield engine


@pytest.fixture(scope="session")
def minilm(minilm_path: Path) -> Any:
    """Real MiniLM in sentence-transformers."""
    return _sentence_transformer(minilm_path)


@pytest.fixture(scope="session")
def small_onnx(export_checkpoint: Callable[..., Path]) -> Path:
    """A small artifact. Shared: change only a copy."""
    return export_checkpoint("bert", **PROMPTED)


@pytest.fixture
def small(small_onnx: Path) -> Iterator[Engine]:
    """A small model with prompts, a default prompt and `include_prompt: false`; each test has its own engine."""
    with Engine(small_onnx) as engine:
        yield engine


@pytest.fixture(scope="session")
def small_plan(export_checkpoint: Callable[..., Path]) -> Path:
    """The model of `small` as a plan without engines. Shared: change only a copy."""
    return export_checkpoint("bert", fp16=True, **PROMPTED)


@pytest.fixture(scope="session")
def small_reference(make_checkpoint: Callable[..., Path]) -> Any:
    """The model of `small` in sentence-transformers."""
    return _sentence_transformer(make_checkpoint("bert", **PROMPTED))


def _sentence_transformer(path: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(path), device="cpu")


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`lab(gpus=2)`: a `Lab`, with a double of that many GPUs. For tests that skip without TensorRT-RTX."""
    from tests.doubles.tensorrt_lab import Lab

    labs: list[Lab] = []

    def make(gpus: int = 1) -> Lab:
        labs.append(Lab(monkeypatch, gpus))
        return labs[-1]

    yield make
    for made in labs:
        made.close()
