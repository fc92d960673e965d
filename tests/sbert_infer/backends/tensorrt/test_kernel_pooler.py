"""Pooling on memory known only by its address. Without a GPU, torch uses host memory."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from sbert_infer.backends.tensorrt import kernel_pooler
from sbert_infer.backends.tensorrt.kernel_pooler import KernelPooler


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

    monkeypatch.setattr(kernel_pooler, "_tensor", tensor)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return used


@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_land_in_the_engines_memory(streams: list[Any], normalize: bool) -> None:
    random = np.random.default_rng(3)
    tokens = random.normal(size=(3, 5, 16)).astype(np.float16)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    out = np.full((3, 16), np.nan, np.float32)
    pooler = KernelPooler(normalize=normalize)
    pooler(tokens.ctypes.data, mask.ctypes.data, out.ctypes.data, tokens.shape, device=1, stream=77)
    wanted = np.stack([tokens[0, :3].astype(np.float32).mean(0), tokens[1].astype(np.float32).mean(0), np.zeros(16)])
    if normalize:
        wanted /= np.maximum(np.linalg.norm(wanted, axis=1, keepdims=True), 1e-12)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    assert streams == [(77, 1)]


def test_memory_is_described_as_others_want_it() -> None:
    described = kernel_pooler._DeviceArray(0x7000, (2, 3, 4), "<f2").__cuda_array_interface__
    assert described == {"data": (0x7000, False), "shape": (2, 3, 4), "typestr": "<f2", "version": 3}
