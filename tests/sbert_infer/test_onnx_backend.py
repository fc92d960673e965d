"""onnxruntime behind the backend protocol: vectors, or an `EngineError` that says what it was given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sbert_infer import EngineError
from sbert_infer.onnx_backend import OnnxBackend


def test_a_batch_that_can_not_run(small_onnx: Path) -> None:
    backend = OnnxBackend(small_onnx)
    mask = np.ones((2, 3), np.int64)
    with pytest.raises(EngineError, match=r"batch of \(2, 3\) tokens"):
        backend.run(np.full((2, 3), 10**6), mask)  # no such token
    assert np.isfinite(backend.run(mask, mask)).all()
    backend.close()
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        backend.run(mask, mask)


def test_a_file_that_onnxruntime_can_not_load(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(EngineError, match=r"bad\.onnx: onnxruntime [\d.]+ can't load it"):
        OnnxBackend(tmp_path / "bad.onnx")


def test_prompt_tokens_are_left_out_of_pooling_only(small_onnx: Path) -> None:
    backend = OnnxBackend(small_onnx)
    ids, mask = np.array([[2, 9, 10, 11, 3]]), np.ones((1, 5), np.int64)
    vectors = [backend.run(ids, mask, prompt_length=count) for count in range(4)]
    for index, vector in enumerate(vectors):
        assert np.isfinite(vector).all()
        for other in vectors[:index]:
            assert np.abs(vector - other).max() > 1e-3
    np.testing.assert_array_equal(vectors[0], backend.run(ids, mask))
