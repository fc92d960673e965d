"""The pipeline with a fake backend, for faults that a real model does not show on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sbert_infer import Engine, EngineError
from sbert_infer.artifact import open_artifact
from sbert_infer.backends.base import Batch
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.text.tokenizer import Tokenizer
from tests.doubles.backend import FakeBackend
from tests.models.checkpoints import TEXTS


class TokenCounts(FakeBackend):
    """Returns each text's number of tokens, twice, as its vector, changed by `change`."""

    max_batch_tokens = 32
    min_batch_tokens = 64

    def __init__(self, change: Callable[[npt.NDArray[np.float32]], Any] = lambda vectors: vectors) -> None:
        super().__init__()
        self.change = change
        self.runs = 0

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> Any:
        self.runs += 1
        return [self.change(np.repeat(batch.mask.sum(1, keepdims=True), 2, axis=1).astype(np.float32))]


def pipeline(backend: TokenCounts, make_checkpoint: Callable[..., Path]) -> Pipeline:
    json = (make_checkpoint("bert") / "tokenizer.json").read_text(encoding="utf-8")
    return Pipeline(Tokenizer(json, 64), backend, pad_id=0, padding_side="right")


def output(artifact: Path) -> DenseOutput:
    """Return an output for vectors of two numbers."""
    return DenseOutput(replace(open_artifact(artifact).manifest, dim=2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error")
def test_a_vector_that_is_not_finite_is_named(
    value: float, small_onnx: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        vectors[vectors[:, 0] == 2, 0] = value  # the empty text has only two special tokens
        vectors[vectors[:, 0] == 2, 1] = -value
        return vectors

    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 5)
    with Engine(small_onnx) as engine:
        engine._pipeline = pipeline(TokenCounts(fault), make_checkpoint)
        engine.artifact = replace(engine.artifact, manifest=replace(engine.manifest, dim=2))
        with pytest.raises(EngineError, match=r"NaN or infinity for text 8 \(2 in all\)"):
            engine.encode([*TEXTS[:8], "", ""], prompt="")


def test_large_but_finite_vectors_pass(small_onnx: Path, make_checkpoint: Callable[..., Path]) -> None:
    most = np.finfo(np.float32).max
    running = pipeline(TokenCounts(lambda vectors: np.full_like(vectors, most)), make_checkpoint)
    (window,) = running.run(TEXTS, output(small_onnx))
    assert (window.vectors == most).all()


def test_an_error_in_a_worker_reaches_the_caller(small_onnx: Path, make_checkpoint: Callable[..., Path]) -> None:
    def fault(vectors: Any) -> Any:
        raise MemoryError("no room")

    running = pipeline(TokenCounts(fault), make_checkpoint)
    for texts in (TEXTS[:1], TEXTS):  # in the calling thread, and in workers
        with pytest.raises(MemoryError, match="no room"):
            list(running.run(texts, output(small_onnx)))


def test_an_error_stops_what_was_started(
    small_onnx: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 40)
    gate = threading.Semaphore(1)

    def fault(vectors: Any) -> Any:
        if not gate.acquire(timeout=0.05):
            return vectors
        raise ValueError("the first batch fails")

    backend = TokenCounts(fault)
    running = pipeline(backend, make_checkpoint)
    with pytest.raises(ValueError, match="first batch"):
        list(running.run([f"{text} {n}" for n in range(10) for text in TEXTS], output(small_onnx), max_batch_texts=1))
    count = backend.runs
    assert count < 80  # two windows of 40 batches were started
    running.submit(lambda: 0).result(timeout=30)  # batches that still wait would run before this
    assert backend.runs == count


def test_the_next_window_is_read_before_the_first_is_asked_for(
    small_onnx: Path, make_checkpoint: Callable[..., Path]
) -> None:
    read: list[str] = []

    def texts() -> Any:
        for number in range(3 * 4096):
            read.append(str(number))
            yield "same"

    windows = pipeline(TokenCounts(), make_checkpoint).run(texts(), output(small_onnx))
    assert next(windows).start == 0
    assert len(read) == 2 * 4096  # and no more, so that memory does not grow
    assert [window.start for window in windows] == [4096, 8192]
