"""Backends on the double of a GPU, and what their vectors should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from sbert_infer.artifact.profiles import Profile
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.backend import TensorRTBackend
from tests.doubles.backend import run_ids
from tests.doubles.cuda import REAL_CUDA, DoubleRuntime, Machine, double_driver
from tests.doubles.tensorrt import MAGIC, double_tensorrt
from tests.models.tensorrt_models import DIM, VOCABULARY, small_encoder

Ids = npt.NDArray[np.int64]
PROFILES = (Profile(8, 6, 6), Profile(16, 3, 3), Profile(40, 1, 1))
MODEL = small_encoder(np.float32)
OUT_OF_MEMORY = REAL_CUDA.cudaError_t.cudaErrorMemoryAllocation
CAPTURE_FAILED = REAL_CUDA.cudaError_t.cudaErrorStreamCaptureInvalidated


class Lab:
    """A machine, and backends on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
        self.machine = Machine(gpus)
        runtime, driver = DoubleRuntime(self.machine), double_driver(self.machine)
        monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
        monkeypatch.setattr(cuda, "_load_driver", lambda: driver)
        self.backends: list[TensorRTBackend] = []

    def open(
        self, *, rtx: bool = False, model: bytes = MODEL, engine: bytes | None = None, **options: Any
    ) -> TensorRTBackend:
        trt = double_tensorrt(self.machine, PROFILES, rtx=rtx)
        plan = MAGIC + model if engine is None else engine
        self.backends.append(TensorRTBackend(trt, plan, **{"profiles": PROFILES, "dim": DIM, **options}))
        return self.backends[-1]

    def close(self) -> None:
        """Close what is open, and see that nothing is left."""
        while self.backends:
            self.backends.pop().close()
        assert not +self.machine.alive, "something was not freed"
        assert self.machine.broken == []


def texts(rows: int, length: int, seed: int = 0) -> tuple[Ids, Ids]:
    """Ids and mask of `rows` texts of different lengths, padded on the right."""
    random = np.random.default_rng([seed, rows, length])
    lengths = random.integers(1, length + 1, rows)
    mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    return random.integers(1, VOCABULARY, (rows, length)) * mask, mask


def expected(ids: Ids, mask: Ids, model: bytes = MODEL, **inputs: Any) -> npt.NDArray[np.float32]:
    """Each text alone and without padding, on onnxruntime."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    alone = [
        {"input_ids": row[None, : m.sum()], "attention_mask": m[None, : m.sum()]}
        for row, m in zip(ids, mask, strict=True)
    ]
    return np.concatenate([session.run(None, {**feed, **inputs})[0] for feed in alone])


def check(backend: TensorRTBackend, rows: int, length: int, seed: int = 0) -> None:
    ids, mask = texts(rows, length, seed)
    np.testing.assert_allclose(run_ids(backend, ids, mask), expected(ids, mask), atol=2e-6)


SHAPES = [(rows, profile.length) for profile in PROFILES for rows in range(1, profile.max_batch + 1)]
