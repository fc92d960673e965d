"""Fixtures for tests of the runtime: engines, and sentence-transformers models to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import Engine
from tests.doubles.backend import FakeBackend, install

# A checkpoint for which every choice of prompt and dimensions changes the vectors.
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
    """An engine with the real MiniLM. Shared: restore what you set."""
    with Engine(minilm_onnx, on_truncate="ignore") as engine:
        yield engine


@pytest.fixture(scope="session")
def minilm(minilm_path: Path) -> Any:
    """The real MiniLM in sentence-transformers."""
    return _sentence_transformer(minilm_path)


@pytest.fixture(scope="session")
def small_onnx(export_checkpoint: Callable[..., Path]) -> Path:
    """Path of a small artifact. Shared: change only a copy."""
    return export_checkpoint("bert", **PROMPTED)


@pytest.fixture
def small(small_onnx: Path) -> Iterator[Engine]:
    """A small model with prompts, a default prompt and `include_prompt: false`, for one test."""
    with Engine(small_onnx) as engine:
        yield engine


@pytest.fixture
def fakes(small: Engine, monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """Replace the model of `small` by a fake; each reopening adds another one to the list."""
    return install(small, monkeypatch)


@pytest.fixture(scope="session")
def small_plan(export_checkpoint: Callable[..., Path]) -> Path:
    """Path of `small` as a plan without TensorRT engines. Shared: change only a copy."""
    return export_checkpoint("bert", fp16=True, **PROMPTED)


@pytest.fixture(scope="session")
def small_reference(make_checkpoint: Callable[..., Path]) -> Any:
    """The model of `small` in sentence-transformers."""
    return _sentence_transformer(make_checkpoint("bert", **PROMPTED))


def _sentence_transformer(path: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(path), device="cpu")


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return `lab(gpus=2)`: a `Lab` with doubles of GPUs. Skips tests without TensorRT-RTX."""
    from tests.doubles.tensorrt_lab import Lab

    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    labs: list[Lab] = []

    def make(gpus: int = 1) -> Lab:
        labs.append(Lab(monkeypatch, gpus))
        return labs[-1]

    yield make
    for made in labs:
        made.close()
