"""The onnxruntime backends return vectors, or raise an `EngineError` with the batch's shape."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from sbert_infer import EngineError
from sbert_infer.artifact.plan_file import CPU_GRAPH, CUDA_GRAPH, open_plan
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.backends.onnxruntime_cuda import OnnxCudaBackend, provider_options
from sbert_infer.backends.onnxruntime_session import FileModel, OnnxModel, cuda_model, open_session
from tests.doubles.backend import run_ids
from tests.models.graphs import cosine


def test_a_batch_that_can_not_run(small_onnx: Path) -> None:
    backend = OnnxBackend(FileModel(small_onnx))
    mask = np.ones((2, 3), np.int64)
    with pytest.raises(EngineError, match=r"batch of \(2, 3\) tokens"):
        run_ids(backend, np.full((2, 3), 10**6), mask)  # there is no such token
    assert np.isfinite(run_ids(backend, mask, mask)).all()
    backend.close()
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        run_ids(backend, mask, mask)


def test_all_cores_are_for_runs_that_come_one_by_one(small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = OnnxBackend(FileModel(small_onnx))
    backend._share_cores = True  # even on a machine with one core
    threads: list[int] = []  # thread counts of the sessions used

    class Noting:
        def __init__(self, threads: int) -> None:
            self.threads = threads

        def run(self, *_: object) -> list[Any]:
            threads.append(self.threads)
            return [np.zeros((1, 4), np.float32)]

    backend._session, backend._lone_session = Noting(1), Noting(2)
    ids, now = np.ones((1, 3), np.int64), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    run_ids(backend, ids, ids, alone=True)
    backend._begin(alone=True)  # a run that starts and does not end
    run_ids(backend, ids, ids, alone=True)
    backend._running -= 1
    for now[0] in (100.1, 100.4, 100.6):
        run_ids(backend, ids, ids, alone=True)
    assert threads == [2, 1, 1, 1, 2]


def test_a_file_that_onnxruntime_can_not_load(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(EngineError, match=r"bad\.onnx: onnxruntime [\d.]+ can't load it"):
        OnnxBackend(FileModel(tmp_path / "bad.onnx"))


def test_prompt_tokens_are_left_out_of_pooling_only(small_onnx: Path) -> None:
    backend = OnnxBackend(FileModel(small_onnx))
    ids, mask = np.array([[2, 9, 10, 11, 3]]), np.ones((1, 5), np.int64)
    vectors = [run_ids(backend, ids, mask, prompt_length=count) for count in range(4)]
    for index, vector in enumerate(vectors):
        assert np.isfinite(vector).all()
        for other in vectors[:index]:
            assert np.abs(vector - other).max() > 1e-3
    np.testing.assert_array_equal(vectors[0], run_ids(backend, ids, mask))


def test_a_gpu_needs_the_other_onnxruntime(small_onnx: Path) -> None:
    with pytest.raises(
        EngineError, match=r"no CUDA provider: pip uninstall -y onnxruntime && pip install 'sbert-infer"
    ):
        OnnxCudaBackend(FileModel(small_onnx), [0])


def test_a_silent_fall_back_to_the_cpu_is_refused(small_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, onnxruntime-gpu offers the CUDA provider but opens a session on the CPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), pytest.raises(EngineError, match="can't use cuda:1"):
        OnnxCudaBackend(FileModel(small_onnx), [1])


def open_on_cpu(model: OnnxModel, gpu: int) -> Any:
    return open_session(model, 1, plan_memory=False)


def test_graphs_and_lengths_on_a_gpu(small_onnx: Path, small_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP16 kernels want lengths that are a multiple of 8."""
    monkeypatch.setattr("sbert_infer.backends.onnxruntime_cuda._open", open_on_cpu)
    plan = open_plan(small_plan)
    model = cuda_model(plan)
    assert model.name == CUDA_GRAPH
    assert OnnxCudaBackend(model, [0]).length_multiple == 8
    bf16 = replace(plan, members={name: size for name, size in plan.members.items() if name != CUDA_GRAPH})
    assert cuda_model(bf16).name == CPU_GRAPH
    assert OnnxCudaBackend(cuda_model(bf16), [0]).length_multiple == 1
    assert OnnxCudaBackend(FileModel(small_onnx), [0]).length_multiple == 1


def test_provider_options(small_onnx: Path, small_plan: Path) -> None:
    assert provider_options(FileModel(small_onnx), 3)["device_id"] == "3"
    assert provider_options(FileModel(small_onnx), 0)["use_tf32"] == "0"  # FP32 means FP32
    assert provider_options(cuda_model(open_plan(small_plan)), 0)["use_tf32"] == "1"
    assert provider_options(FileModel(small_onnx), 0)["enable_skip_layer_norm_strict_mode"] == "1"


def test_bound_inputs_and_outputs(small_onnx: Path, small_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend for GPUs makes the same calls here, but in the CPU's memory."""
    monkeypatch.setattr("sbert_infer.backends.onnxruntime_cuda._MEMORY", "cpu")
    monkeypatch.setattr("sbert_infer.backends.onnxruntime_cuda._open", open_on_cpu)
    ids, mask = np.array([[2, 9, 10, 11, 3], [2, 9, 3, 0, 0]]), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    models: list[OnnxModel] = [FileModel(small_onnx), cuda_model(open_plan(small_plan))]
    for model in models:
        backend, plain = OnnxCudaBackend(model, [0, 0]), OnnxBackend(FileModel(small_onnx))
        assert (backend.workers, backend.device) == (4, "cuda:0,cuda:0")
        for prompt_length in (0, 2):
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(run_ids, *zip(*[(backend, ids, mask, prompt_length)] * 12, strict=True)))
            for vectors in found:
                assert cosine(vectors, run_ids(plain, ids, mask, prompt_length)).min() > 0.9999
        backend.close()
        backend.close()
        with pytest.raises(EngineError, match="closed"):
            run_ids(backend, ids, mask)
