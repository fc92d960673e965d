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

from sbert_infer import EngineError, SbertInferWarning
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.loaded_engine import Interface
from sbert_infer.backends.tensorrt.tensors import INPUTS
from sbert_infer.text.packing import Packer
from sbert_infer.types import Shape

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.tensorrt_lab import CAPTURE_FAILED, OUT_OF_MEMORY, SHAPES, Lab, check, packed, run_packed

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
        ({"packer": Packer(SHAPES[:2], 16)}, "the engine was built for input_ids"),
        ({"packer": Packer((*SHAPES[:3], Shape(1, 40, 9)), 16)}, "the engine was built for starts"),
        ({"interface": Interface(INPUTS, "sentence_embedding", 384)}, "vectors have 16 dimensions, not 384"),
        ({"interface": Interface(INPUTS[:3], "sentence_embedding", 16)}, "tensors are .*: export the model again"),
        ({"interface": Interface(INPUTS, "token_embeddings", 16)}, "tensors are .*: export the model again"),
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
    there.machine.failures[function] = [OUT_OF_MEMORY]
    with pytest.raises(EngineError, match=f"{function} failed: cudaErrorMemoryAllocation"):
        run_packed(backend, packed(SHAPES[1]))
    for seed in range(4):
        check(backend, seed=seed)


def test_a_batch_that_fails_says_why(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open(cuda_graphs=False)
    there.machine.failures["execute_async_v3"] = [OUT_OF_MEMORY]
    with pytest.raises(EngineError, match="tensorrt: execute_async_v3 failed: the kernel fell over"):
        run_packed(backend, packed(SHAPES[1]))
    check(backend)


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
    there.machine.failures[function] = codes
    with pytest.warns(SbertInferWarning, match=rf"no CUDA graph of 1 x 8 tokens, .*: {function} failed") as caught:
        backend = there.open()
    assert len(caught) == 1
    for shape in SHAPES:
        check(backend, shape)
    assert there.machine.launches == 0


def test_work_that_can_not_be_captured(lab: Callable[..., Lab]) -> None:
    there = lab()
    there.machine.failures["execute_async_v3"] = [None, OUT_OF_MEMORY]  # fails in the recording, after the first run
    with pytest.warns(SbertInferWarning, match=r"no CUDA graph .* execute_async_v3 failed: the kernel fell over"):
        backend = there.open()
    check(backend)
    assert there.machine.launches == 0


# --------------------------------------------------------------------------------------------------
# Closing


def test_everything_is_freed_in_order(lab: Callable[..., Lab]) -> None:
    there = lab(gpus=2)
    backend = there.open(devices=(0, 1))
    assert there.machine.alive["context"] == there.machine.alive["graph executable"] == 6 * len(SHAPES)
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
        run_packed(backend, packed(SHAPES[0]))


def test_close_waits_for_the_batch_that_runs(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    running, go_on = threading.Event(), threading.Event()

    def before_kernel() -> None:
        running.set()
        go_on.wait(20)

    there.machine.before_kernel = before_kernel
    with ThreadPoolExecutor(2) as pool:
        batch = pool.submit(check, backend)
        assert running.wait(20)
        closing = pool.submit(backend.close)
        with pytest.raises(TimeoutError):
            closing.result(timeout=0.2)
        go_on.set()
        batch.result()
        closing.result()


def test_a_backend_that_is_forgotten_is_freed(lab: Callable[..., Lab]) -> None:
    there = lab()
    check(there.open())
    there.opened.clear()
    assert not +there.machine.alive


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_after_a_fork_it_is_refused(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    check(backend)
    count = len(there.machine.calls)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run_packed(backend, packed(SHAPES[1]))
        except EngineError as error:
            backend.close()
            code = 0 if "before a fork" in str(error) and len(there.machine.calls) == count else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(backend, seed=1)
