"""The TensorRT backend on a double of a GPU: its calls, their order, and the vectors that come of them.

No GPU, no CUDA and no TensorRT run here (see tests/tensorrt_double.py), so nothing here speaks of
speed or of FP16.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer import EngineError
from tests.doubles.backend import run_ids
from tests.models.tensorrt_models import small_encoder

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.tensorrt import REAL_TRT
from tests.doubles.tensorrt_lab import PROFILES, SHAPES, Lab, check, expected, texts

# --------------------------------------------------------------------------------------------------------------
# vectors


@pytest.mark.parametrize("rtx", [False, True], ids=["tensorrt", "rtx"])
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["plain", "graphs"])
def test_right_vectors_for_every_shape(lab: Callable[..., Lab], rtx: bool, cuda_graphs: bool) -> None:
    backend = lab().open(rtx=rtx, cuda_graphs=cuda_graphs)
    for seed in range(3):
        for rows, length in SHAPES:
            check(backend, rows, length, seed)


@settings(max_examples=25, deadline=None)
@given(order=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=30))
def test_right_vectors_in_any_order(order: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lab = Lab(monkeypatch, 1)
        backend = lab.open()
        for seed, (rows, length) in enumerate(order):
            check(backend, rows, length, seed)
        backend.close()
        assert not +lab.machine.alive


def test_a_result_is_not_overwritten_by_the_next(lab: Callable[..., Lab]) -> None:
    backend = lab().open()
    ids, mask = texts(3, 8)
    first = run_ids(backend, ids, mask)
    run_ids(backend, *texts(6, 8, seed=1))
    np.testing.assert_allclose(first, expected(ids, mask), atol=2e-6)


def test_the_prompt_is_left_out_of_pooling(lab: Callable[..., Lab]) -> None:
    model = small_encoder(np.float32, prompt_length=True)
    backend = lab().open(model=model, prompt_length=True)
    ids, mask = np.arange(1, 9)[None], np.ones((1, 8), np.int64)
    for count in (0, 3, 1, 3):
        wanted = expected(ids, mask, model, prompt_length=np.array(count))
        np.testing.assert_allclose(run_ids(backend, ids, mask, count), wanted, atol=2e-6)


def test_token_vectors_are_pooled_on_the_same_stream(lab: Callable[..., Lab]) -> None:
    there = lab()
    machine = there.machine

    def pooler(tokens: int, mask: int, out: int, shape: tuple[int, int, int], device: int, stream: int) -> None:
        def kernel() -> None:
            weights = machine.at(mask, np.int64, shape[:2])[..., None].astype(np.float32)
            summed = (machine.at(tokens, np.float16, shape) * weights).sum(1)
            machine.at(out, np.float32, (shape[0], shape[2]))[:] = summed / np.maximum(weights.sum(1), 1e-9)

        assert device == machine.device == 0
        machine.enqueue(stream, kernel)

    backend = there.open(model=small_encoder(np.float32, tokens=True), pooler=pooler)
    for seed, (rows, length) in enumerate([(2, 8), (2, 8), (3, 16), (5, 8), (2, 8)]):
        ids, mask = texts(rows, length, seed)
        np.testing.assert_allclose(run_ids(backend, ids, mask), expected(ids, mask), atol=2e-3)  # tokens are in FP16


def test_the_kernel_can_not_leave_a_prompt_out(lab: Callable[..., Lab]) -> None:
    with pytest.raises(EngineError, match="can't be pooled by the kernel"):
        lab().open(pooler=lambda *args: None, prompt_length=True)


# -------------------------------------------------------------------------------------------------------------
# contract


def test_what_the_pipeline_is_told(lab: Callable[..., Lab]) -> None:
    backend = lab(gpus=2).open(devices=(0, 1))
    assert backend.edges == (8, 16, 40)
    assert (backend.workers, backend.threads, backend.device) == (4, 1, "cuda:0,cuda:1")
    for profile in PROFILES:  # what the planner makes of it fits, and is not less than the profiles allow
        assert max(1, backend.max_batch_tokens // profile.length) <= profile.max_batch
    assert backend.max_batch_tokens >= min(profile.max_batch * profile.length for profile in PROFILES)
    assert backend.describe() == "tensorrt 0.0 on Double GPU (cuda:0), Double GPU (cuda:1)"


@pytest.mark.parametrize(
    ("rows", "length", "message"),
    [
        (1, 9, r"texts padded to \(8, 16, 40\) tokens, not to 9"),
        (1, 41, "not to 41"),
        (4, 16, "1 to 3 texts of 16 tokens, not 4"),
        (0, 8, "1 to 6 texts of 8 tokens, not 0"),
    ],
)
def test_batches_that_fit_no_profile(lab: Callable[..., Lab], rows: int, length: int, message: str) -> None:
    backend = lab().open()
    ones = np.ones((rows, length), np.int64)
    with pytest.raises(EngineError, match=message):
        run_ids(backend, ones, ones)


# ----------------------------------------------------------------------------------------------------------------
# calls


def test_a_context_is_made_ready_in_nvidias_order(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open(cuda_graphs=False)
    start = len(there.machine.calls)
    check(backend, 2, 16)
    calls = there.machine.calls[start:]
    assert [call for call in calls if call[0] in ("set_input_shape", "set_optimization_profile_async")] == [
        ("set_optimization_profile_async", 1),
        ("set_input_shape", "input_ids", (2, 16)),
        ("set_input_shape", "attention_mask", (2, 16)),
    ]
    assert [call[0] for call in calls] == [
        "cudaSetDevice",
        "create_execution_context",
        "set_optimization_profile_async",
        "cudaEventRecord",
        "cudaEventSynchronize",
        *["set_input_shape"] * 2,
        *["set_tensor_address"] * 3,
        "infer_shapes",
        "set_device_memory",
        *["cudaMemcpyAsync"] * 2,
        "execute_async_v3",
        "cudaMemcpyAsync",
        "cudaEventRecord",
        "cudaEventSynchronize",
    ]


def test_a_second_batch_only_copies_and_launches(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    check(backend, 2, 16)
    start = len(there.machine.calls)
    check(backend, 2, 16, 1)
    copy, launch, wait = "cudaMemcpyAsync", "cudaGraphLaunch", ["cudaEventRecord", "cudaEventSynchronize"]
    assert there.machine.names()[start:] == ["cudaSetDevice", copy, copy, launch, copy, *wait]


def test_rows_are_padded_to_few_shapes(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    for seed in range(2):
        for rows in range(1, 7):
            check(backend, rows, 8, seed)
    batches = [call[2] for call in there.machine.calls if call[:2] == ("set_input_shape", "input_ids")]
    assert sorted(batches) == [(1, 8), (2, 8), (4, 8), (6, 8)]


def test_one_graph_per_shape_after_one_plain_run(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    for seed in range(4):
        check(backend, 2, 8, seed)
        check(backend, 1, 40, seed)
    assert there.machine.names().count("execute_async_v3") == 4  # for each shape: the first run, and the recording
    assert there.machine.launches == 6
    assert there.machine.kernels == 8


@pytest.mark.parametrize("rtx", [False, True])
def test_without_graphs_nothing_is_captured(lab: Callable[..., Lab], rtx: bool) -> None:
    there = lab()
    backend = there.open(rtx=rtx, cuda_graphs=False)
    for seed in range(3):
        check(backend, 2, 8, seed)
    assert "cudaStreamBeginCapture" not in there.machine.names()
    assert there.machine.launches == 0


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_rtx_captures_by_itself(lab: Callable[..., Lab], cuda_graphs: bool) -> None:
    there = lab()
    backend = there.open(rtx=True, cuda_graphs=cuda_graphs)
    check(backend, 2, 8)
    strategies = REAL_TRT.CudaGraphStrategy
    (config,) = {call[1] for call in there.machine.calls if call[0] == "create_execution_context"}
    assert config.cuda_graph_strategy == (strategies.WHOLE_GRAPH_CAPTURE if cuda_graphs else strategies.DISABLED)
    assert "set_runtime_cache" in there.machine.names()
    assert "cudaStreamBeginCapture" not in there.machine.names()


def test_memory_is_bounded(lab: Callable[..., Lab]) -> None:
    """Buffers are made at the start; contexts and graphs once per shape."""
    there = lab()
    backend = there.open()
    before = there.machine.names().count("cudaMalloc"), there.machine.names().count("cudaHostAlloc")
    for seed in range(3):
        for rows, length in SHAPES:
            check(backend, rows, length, seed)
    assert (there.machine.names().count("cudaMalloc"), there.machine.names().count("cudaHostAlloc")) == before
    shapes = sum(len(profile.batches) for profile in PROFILES)
    assert there.machine.alive["context"] == there.machine.alive["graph executable"] == shapes
    assert there.machine.alive["graph"] == 0


# -------------------------------------------------------------------------------------------------------
# slots and GPUs


def test_two_batches_run_at_once(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    together = threading.Barrier(2, timeout=20)
    there.machine.before_kernel = together.wait
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(check, backend, 3, 8, seed) for seed in range(2)]:
            result.result()


@pytest.mark.parametrize("gpus", [1, 2])
def test_many_threads_get_their_own_vectors(lab: Callable[..., Lab], gpus: int) -> None:
    backend = lab(gpus).open(devices=range(gpus))
    work = [(*SHAPES[index % len(SHAPES)], index) for index in range(120)]
    with ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(check, backend, *each) for each in work]:
            result.result()


def test_every_gpu_is_used(lab: Callable[..., Lab]) -> None:
    there = lab(gpus=3)
    backend = there.open(devices=(2, 0))
    assert [call[1] for call in there.machine.calls if call[0] == "deserialize_cuda_engine"] == [2, 0]
    together = threading.Barrier(4, timeout=20)
    devices: list[int] = []

    def before_kernel() -> None:
        together.wait()
        devices.append(there.machine.device)

    there.machine.before_kernel = before_kernel
    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(check, backend, 2, 8, seed) for seed in range(4)]:
            result.result()
    assert sorted(devices) == [0, 0, 2, 2]


def test_a_lone_caller_stays_on_one_slot(lab: Callable[..., Lab]) -> None:
    there = lab(gpus=2)
    backend = there.open(devices=(0, 1))
    for seed in range(5):
        check(backend, 2, 8, seed)
    assert there.machine.alive["context"] == 1


@pytest.mark.parametrize("devices", [(), (1,), (0, 0), (-1,)])
def test_gpus_that_are_not_there(lab: Callable[..., Lab], devices: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match=rf"among 0 to 0, got {re.escape(str(list(devices)))}"):
        lab().open(devices=devices)
