"""The TensorRT backend on a double of a GPU: its calls, their order, and its vectors.

No GPU, CUDA or TensorRT is used here (see tests/doubles/tensorrt.py), so these tests say nothing
about speed or FP16.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer import EngineError
from sbert_infer.backends.base import Batch
from sbert_infer.backends.tensorrt.slot import PooledMemory
from sbert_infer.types import Shape

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("cuda.bindings.runtime")

from tests.doubles.tensorrt import REAL_TRT
from tests.doubles.tensorrt_lab import PACKER, SHAPES, Lab, check, expected, packed, run_packed

# --------------------------------------------------------------------------------------------------
# Vectors


@pytest.mark.parametrize("rtx", [False, True], ids=["tensorrt", "rtx"])
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["plain", "graphs"])
def test_right_vectors_for_every_shape(lab: Callable[..., Lab], rtx: bool, cuda_graphs: bool) -> None:
    backend = lab().open(rtx=rtx, cuda_graphs=cuda_graphs)
    for seed in range(3):
        for shape in SHAPES:
            check(backend, shape, seed)


@settings(max_examples=25, deadline=None)
@given(order=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=30))
def test_right_vectors_in_any_order(order: list[Shape]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        lab = Lab(monkeypatch, 1)
        backend = lab.open()
        for seed, shape in enumerate(order):
            check(backend, shape, seed)
        backend.close()
        assert not +lab.machine.alive


def test_a_result_is_not_overwritten_by_the_next(lab: Callable[..., Lab]) -> None:
    backend = lab().open()
    batch = packed(SHAPES[1])
    first = run_packed(backend, batch)
    run_packed(backend, packed(SHAPES[1], seed=1))
    np.testing.assert_allclose(first, expected(batch), atol=2e-6)


def test_what_is_pooled_is_what_the_spans_say(lab: Callable[..., Lab]) -> None:
    """A prompt that pooling leaves out is before the start of its text's span."""
    batch = packed(SHAPES[2])
    packing = batch.packing
    assert packing is not None
    last = replace(batch, packing=replace(packing, starts=np.maximum(packing.ends - 1, packing.starts)))
    backend = lab().open()
    assert np.abs(run_packed(backend, last) - run_packed(backend, batch)).max() > 0.1


def test_token_vectors_are_pooled_on_the_same_stream(lab: Callable[..., Lab]) -> None:
    there = lab()
    machine = there.machine

    def pooler(memory: PooledMemory, shape: tuple[int, int, int], longest: int, device: int, stream: int) -> None:
        count, texts, dim = shape

        def kernel() -> None:
            hidden = machine.at(memory.tokens, np.float16, (count, dim)).astype(np.float32)
            starts, ends = (machine.at(address, np.int64, (texts,)) for address in (memory.starts, memory.ends))
            assert (ends - starts).max() == longest
            means = [hidden[start:end].mean(0) for start, end in zip(starts, ends, strict=True)]
            machine.at(memory.out, np.float32, (texts, dim))[:] = means

        assert device == machine.device == 0
        machine.enqueue(stream, kernel)

    backend = there.open(pooler=pooler)
    for seed, shape in enumerate([*SHAPES, *SHAPES[::-1]]):
        batch = packed(shape, seed)
        np.testing.assert_allclose(run_packed(backend, batch), expected(batch), atol=2e-2)  # tokens are FP16


# --------------------------------------------------------------------------------------------------
# Contract


def test_what_the_pipeline_is_told(lab: Callable[..., Lab]) -> None:
    backend = lab(gpus=2).open(devices=(0, 1))
    assert backend.packer == PACKER
    assert (backend.workers, backend.threads, backend.device) == (6, 1, "cuda:0,cuda:1")
    assert backend.max_batch_tokens == max(shape.tokens for shape in SHAPES) == 48
    assert backend.describe() == "tensorrt 0.0 on Double GPU (cuda:0), Double GPU (cuda:1)"


def test_batches_that_it_can_not_run(lab: Callable[..., Lab]) -> None:
    backend = lab().open()
    with pytest.raises(EngineError, match=r"packed rows of 1 x 8, 1 x 40, 3 x 16, 6 x 8, not \(2, 8\)"):
        run_packed(backend, packed(Shape(2, 8, 2)))
    ones = np.ones((6, 8), np.int64)
    with pytest.raises(EngineError, match="packed rows"):
        run_packed(backend, Batch(ones, ones))
    with pytest.raises(EngineError, match="gives sentence_embedding only, not token_embeddings"):
        backend.run(packed(SHAPES[0]), ("token_embeddings",))


# --------------------------------------------------------------------------------------------------
# Calls


def test_every_shape_is_ready_when_it_is_open(lab: Callable[..., Lab]) -> None:
    """Nothing is made, compiled or captured while a batch waits."""
    there = lab()
    backend = there.open()
    copy, launch, wait = "cudaMemcpyAsync", "cudaGraphLaunch", ["cudaEventRecord", "cudaEventSynchronize"]
    for shape in SHAPES:
        start = len(there.machine.calls)
        check(backend, shape)
        assert there.machine.names()[start:] == ["cudaSetDevice", *[copy] * 5, launch, copy, *wait]


def test_a_context_is_made_ready_in_nvidias_order(lab: Callable[..., Lab]) -> None:
    there = lab()
    there.open()
    names = there.machine.names()
    start = names.index("create_execution_context")
    stop = names.index("create_execution_context", start + 1)
    assert names[start:stop] == [
        "create_execution_context",
        "set_optimization_profile_async",
        "cudaEventRecord",
        "cudaEventSynchronize",
        *["set_input_shape", "set_tensor_address"] * 5,
        "set_tensor_address",
        "infer_shapes",
        "set_device_memory",
        *["cudaMemcpyAsync"] * 5,
        "execute_async_v3",
        "cudaMemcpyAsync",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaStreamBeginCapture",
        "execute_async_v3",
        "cudaStreamEndCapture",
        "cudaGraphInstantiate",
        "cudaGraphDestroy",
    ]


@pytest.mark.parametrize("rtx", [False, True])
def test_without_graphs_nothing_is_captured(lab: Callable[..., Lab], rtx: bool) -> None:
    there = lab()
    backend = there.open(rtx=rtx, cuda_graphs=False)
    for seed in range(3):
        check(backend, seed=seed)
    assert "cudaStreamBeginCapture" not in there.machine.names()
    assert there.machine.launches == 0


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_rtx_captures_by_itself(lab: Callable[..., Lab], cuda_graphs: bool) -> None:
    there = lab()
    there.open(rtx=True, cuda_graphs=cuda_graphs)
    strategies = REAL_TRT.CudaGraphStrategy
    (config,) = {call[1] for call in there.machine.calls if call[0] == "create_execution_context"}
    assert config.cuda_graph_strategy == (strategies.WHOLE_GRAPH_CAPTURE if cuda_graphs else strategies.DISABLED)
    assert "cudaStreamBeginCapture" not in there.machine.names()


def test_rtx_compiles_for_the_first_process_only(lab: Callable[..., Lab]) -> None:
    there = lab()
    there.open(rtx=True)
    assert there.machine.compiled == len(SHAPES)  # once for all slots, before any batch
    there.open(rtx=True)  # the first is still open: kernels are kept as soon as every shape has run
    assert there.machine.compiled == len(SHAPES)


def test_memory_is_bounded(lab: Callable[..., Lab]) -> None:
    """Buffers, contexts and graphs are made at the start, for three slots."""
    there = lab()
    backend = there.open()
    made = ("cudaMalloc", "cudaHostAlloc", "create_execution_context")
    before = [there.machine.names().count(name) for name in made]
    for seed in range(3):
        for shape in SHAPES:
            check(backend, shape, seed)
    assert [there.machine.names().count(name) for name in made] == before
    assert there.machine.alive["context"] == there.machine.alive["graph executable"] == 3 * len(SHAPES)
    assert there.machine.alive["graph"] == 0


# --------------------------------------------------------------------------------------------------
# Slots and GPUs


def test_two_batches_run_at_once(lab: Callable[..., Lab]) -> None:
    there = lab()
    backend = there.open()
    together = threading.Barrier(2, timeout=20)
    there.machine.before_kernel = together.wait
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(check, backend, SHAPES[1], seed) for seed in range(2)]:
            result.result()


@pytest.mark.parametrize("gpus", [1, 2])
def test_many_threads_get_their_own_vectors(lab: Callable[..., Lab], gpus: int) -> None:
    backend = lab(gpus).open(devices=range(gpus))
    work = [(SHAPES[index % len(SHAPES)], index) for index in range(120)]
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
        for result in [pool.submit(check, backend, SHAPES[1], seed) for seed in range(4)]:
            result.result()
    assert sorted(devices) == [0, 0, 2, 2]


def test_no_gpu_idles_while_another_has_two_batches(lab: Callable[..., Lab]) -> None:
    there = lab(gpus=2)
    backend = there.open(devices=(0, 1))
    taken = [backend._take() for _ in range(6)]
    backend._free.extend(sorted(taken, key=lambda slot: slot.engine.device))  # one GPU's came back first
    assert {backend._take().engine.device for _ in range(2)} == {0, 1}
    backend._free.extend(slot for slot in taken if slot not in backend._free)


@pytest.mark.parametrize("devices", [(), (1,), (0, 0), (-1,)])
def test_gpus_that_are_not_there(lab: Callable[..., Lab], devices: tuple[int, ...]) -> None:
    with pytest.raises(EngineError, match=rf"among 0 to 0, got {re.escape(str(list(devices)))}"):
        lab().open(devices=devices)
