"""Failures and closing of the TensorRT backend, on a double of a GPU.

No GPU, CUDA or TensorRT is used here (see tests/doubles/tensorrt.py), so these tests say nothing
about speed or FP16.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sbert_infer.artifact.profiles import Profile

from sbert_infer import EngineError, SbertInferWarning
from sbert_infer.backends.tensorrt import cuda
from tests.doubles.backend import run_ids

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.tensorrt_lab import CAPTURE_FAILED, OUT_OF_MEMORY, PROFILES, SHAPES, Lab, check, texts

# --------------------------------------------------------------------------------------------------
# Errors


def test_no_driver_and_no_runtime_is_made(lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    there = lab()
    monkeypatch.setattr(cuda, "driver_problem", lambda: "there is no NVIDIA driver")
    with pytest.raises(EngineError, match="no engine can run here: there is no NVIDIA driver"):
        there.open()
    assert there.machine.calls == []


def test_an_engine_that_does_not_load(lab: Callable[..., Lab]) -> None:
    with pytest.raises(
        EngineError, match=r"tensorrt 0\.0 can't load the engine on cuda:0: Serialization assertion failed: magic"
    ):
        lab().open(engine=b"of another version")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profiles": PROFILES[:2]}, "the engine was built for the shapes"),
        ({"profiles": (*PROFILES[:2], Profile(40, 1, 2))}, "the engine was built for the shapes"),
        ({"dim": 384}, "vectors have 16 dimensions, not 384"),
        ({"prompt_length": True}, "tensors are .*: export the model again"),
        ({"pooler": lambda *args: None}, "tensors are .*: export the model again"),
    ],
)
def test_an_engine_that_is_not_the_one(lab: Callable[..., Lab], options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        lab().open(**options)


@pytest.mark.parametrize("function", ["cudaMalloc", "cudaHostAlloc"])
@pytest.mark.parametrize("successes", [0, 3, 5])
def test_out_of_memory_frees_what_was_made(lab: Callable[..., Lab], function: str, successes: int) -> None:
    there = lab()
    there.machine.failures[function] = [None] * successes + [OUT_OF_MEMORY]
    with pytest.raises(EngineError, match=f"{function} failed: cudaErrorMemoryAllocation"):
        there.open()
    assert not +there.machine.alive


@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaEventSynchronize", "cudaSetDevice"])
def test_a_cuda_call_that_fails_is_named_and_the_next_batch_runs(lab: Callable[..., Lab], function: str) -> None:
    there = lab()
    backend = there.open()
    check(backend, 2, 8)
    there.machine.failures[function] = [OUT_OF_MEMORY]
    with pytest.raises(EngineError, match=f"{function} failed: cudaErrorMemoryAllocation"):
        run_ids(backend, *texts(2, 8))
    for seed in range(4):
        check(backend, 2, 8, seed)


def test_a_batch_that_fails_says_why(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    there.machine.failures["execute_async_v3"] = [OUT_OF_MEMORY]
    with pytest.raises(EngineError, match="tensorrt: execute_async_v3 failed: the kernel fell over"):
        run_ids(backend, *texts(2, 8))
    check(backend, 2, 8)


@pytest.mark.parametrize(
    ("function", "codes"),
    [
        ("cudaStreamEndCapture", [CAPTURE_FAILED]),
        ("cudaGraphInstantiate", [OUT_OF_MEMORY]),
        ("cudaStreamBeginCapture", [CAPTURE_FAILED]),
    ],
)
def test_a_capture_that_fails_is_one_warning(lab: Callable[..., Lab], function: str, codes: list[Any]) -> None:
    there = lab()
    backend = there.open()
    there.machine.failures[function] = codes
    with pytest.warns(SbertInferWarning, match=rf"no CUDA graph of 2 x 8 tokens, .*: {function} failed"):
        check(backend, 2, 8)
    for seed in range(3):  # with warnings as errors, a second one would raise
        for rows, length in SHAPES:
            check(backend, rows, length, seed)
    assert there.machine.launches == 0


def test_work_that_can_not_be_captured(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    there.machine.failures["execute_async_v3"] = [None, OUT_OF_MEMORY]  # fails in the recording, after the first run
    with pytest.warns(SbertInferWarning, match=r"no CUDA graph .* execute_async_v3 failed: the kernel fell over"):
        check(backend, 2, 8)
    check(backend, 2, 8, 1)
    assert there.machine.launches == 0


# --------------------------------------------------------------------------------------------------
# Closing


def test_everything_is_freed_in_order(lab: Callable[..., Lab]) -> None:
    there = lab(gpus=2)
    backend = there.open(devices=(0, 1))
    there.machine.before_kernel = threading.Barrier(4, timeout=20).wait  # so that each slot gets a context
    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(check, backend, 2, 8, seed) for seed in range(4)]:
            result.result()
    assert there.machine.alive["context"] == there.machine.alive["graph executable"] == 4
    start = len(there.machine.calls)
    backend.close()
    names = there.machine.names()[start:]
    assert not +there.machine.alive
    order = ["cudaGraphExecDestroy", "~IExecutionContext", "cudaFree", "cudaStreamDestroy"]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    last_context = len(names) - names[::-1].index("~IExecutionContext")
    assert names.index("~ICudaEngine") > last_context
    backend.close()  # a second call does nothing
    assert there.machine.names()[start:] == names
    with pytest.raises(EngineError, match="the engine was closed during this call"):
        run_ids(backend, *texts(1, 8))


def test_close_waits_for_the_batch_that_runs(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    running, go_on = threading.Event(), threading.Event()

    def before_kernel() -> None:
        running.set()
        go_on.wait(20)

    there.machine.before_kernel = before_kernel
    with ThreadPoolExecutor(2) as pool:
        batch = pool.submit(check, backend, 2, 8)
        assert running.wait(20)
        closing = pool.submit(backend.close)
        with pytest.raises(TimeoutError):
            closing.result(timeout=0.2)
        go_on.set()
        batch.result()
        closing.result()


def test_a_backend_that_is_forgotten_is_freed(lab: Callable[..., Lab]) -> None:
    there = lab()
    check(there.open(), 2, 8)
    there.backends.clear()
    assert not +there.machine.alive


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_after_a_fork_it_is_refused(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    check(backend, 2, 8)
    count = len(there.machine.calls)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run_ids(backend, *texts(2, 8))
        except EngineError as error:
            backend.close()
            code = 0 if "before a fork" in str(error) and len(there.machine.calls) == count else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(backend, 2, 8, 1)
