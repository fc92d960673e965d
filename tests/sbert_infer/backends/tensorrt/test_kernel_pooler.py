"""Pooling on memory known only by its address. Without a GPU, torch uses host memory."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from sbert_infer import EngineError
from sbert_infer.backends.tensorrt import kernel_pooler
from sbert_infer.backends.tensorrt.kernel_pooler import KernelPooler
from sbert_infer.backends.tensorrt.slot import PooledMemory


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let torch work on host memory, and record the streams it is told to use."""
    used: list[Any] = []

    def tensor(pointer: int, shape: tuple[int, ...], typestr: str, device: int) -> torch.Tensor:
        size = int(np.prod(shape)) * np.dtype(typestr).itemsize
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
        return torch.from_numpy(memory.view(typestr).reshape(shape))

    @contextlib.contextmanager
    def stream(external: Any) -> Any:
        used.append(external)
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel_pooler, "_tensor", tensor)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return used


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_vectors_land_in_the_engines_memory(streams: list[Any], normalize: bool, bf16: bool) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float16
    tokens = torch.randn(15, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    starts, ends = np.array([5, 0, 7, 2]), np.array([10, 3, 7, 15])  # the third span is empty
    out = np.full((4, 16), np.nan, np.float32)
    memory = PooledMemory(tokens.data_ptr(), starts.ctypes.data, ends.ctypes.data, out.ctypes.data)
    pooler = KernelPooler(normalize=normalize, bf16=bf16)
    pooler(memory, (15, 4, 16), longest=13, device=1, stream=77)
    wide = tokens.float().numpy()
    wanted = np.stack([wide[5:10].mean(0), wide[:3].mean(0), np.zeros(16), wide[2:15].mean(0)])
    if normalize:
        wanted /= np.maximum(np.linalg.norm(wanted, axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    assert streams == [(77, 1)]


def test_memory_is_described_as_others_want_it() -> None:
    described = kernel_pooler._DeviceArray(0x7000, (2, 3, 4), "<f2").__cuda_array_interface__
    assert described == {"data": (0x7000, False), "shape": (2, 3, 4), "typestr": "<f2", "version": 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch can use a GPU")
def test_a_torch_that_can_not_use_the_gpu_is_noticed_on_opening() -> None:
    with pytest.raises(EngineError, match=r"needs a torch that can use this GPU, .* can't: pip install"):
        KernelPooler(normalize=True)


def test_what_torch_raises_is_an_error_of_ours(streams: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("sbert_infer.kernels.mean_pool.mean_pool_spans", fail)
    numbers = np.zeros(16, np.int64)
    memory = PooledMemory(*[numbers.ctypes.data] * 4)
    with pytest.raises(EngineError, match="the pooling kernel can't run on cuda:0: Failed to find C compiler"):
        KernelPooler(normalize=True)(memory, (1, 1, 16), longest=1, device=0, stream=0)
