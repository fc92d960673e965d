"""The kernels compiled for real GPUs, as the launchers launch them: checks of the machine code.

Run by test_triton.py in a separate process. Nothing runs on a GPU: Triton needs none to compile.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from sbert_infer.kernels import launch
from sbert_infer.kernels.launch import Tiles, pick_tiles
from tests.kernels.machine_code import problems, ptx_loads, read, sass_loads

TARGETS = [*(GPUTarget("cuda", arch, 32) for arch in (75, 80, 86, 89, 90, 100, 120)), GPUTarget("hip", "gfx942", 64)]
A100 = TARGETS[1]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def test_this_is_the_triton_to_check() -> None:
    assert Path(triton.__file__).is_relative_to(os.environ["EXPECTED_TRITON"])


class NoDevice:
    """Tell Triton which GPU to compile for. Each target is a device of its own."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return TARGETS.index(self.target)

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect compiled kernels: launches compile instead, as specialized by their arguments."""
    kernels: list[Any] = []

    def warmup(kernel: Any, grid: tuple[int, int, int], **arguments: Any) -> None:
        kernels.append(kernel.warmup(grid=grid, **arguments))

    monkeypatch.setattr(launch, "_run", warmup)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 108)
    compile_for(A100)
    yield kernels
    triton.runtime.driver.set_active(None)


def compile_for(target: GPUTarget) -> None:
    triton.runtime.driver.set_active(NoDevice(target))


def launch_padded(hidden: torch.Tensor, mask_dtype: torch.dtype = torch.int64) -> None:
    mask = torch.ones(hidden.shape[:2], dtype=mask_dtype)
    launch.launch_mean_pool(hidden, mask, normalize=True, out_dtype=F32)


def launch_split_spans(hidden: torch.Tensor) -> None:
    spans = torch.zeros(2, dtype=torch.int32)
    launch.launch_mean_pool_spans(hidden, spans, spans, longest=512, normalize=True, out_dtype=F16)


def launch_packed_rows(dtype: torch.dtype) -> None:
    """As a TensorRT engine of MiniLM is pooled: 32 rows of 512 tokens with many texts."""
    spans = torch.zeros(1000, dtype=torch.int64)
    hidden = torch.zeros(32 * 512, 384, dtype=dtype)
    launch.launch_mean_pool_spans(hidden, spans, spans, longest=512, normalize=True, out_dtype=F32)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
def test_the_code_for_packed_rows(target: GPUTarget, compiled: list[Any]) -> None:
    compile_for(target)
    for dtype in (F16, BF16):
        launch_packed_rows(dtype)
    assert len(compiled) == 2  # one launch each
    for kernel in compiled:
        assert problems(read(kernel), other_loads=frozenset({64})) == []


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
def test_the_code_for(target: GPUTarget, compiled: list[Any]) -> None:
    compile_for(target)
    launch_padded(torch.zeros(1000, 2, 384, dtype=F16))  # MiniLM, one launch
    launch_split_spans(torch.zeros(9, 768, dtype=BF16))  # and the second step
    minilm, spans, combine = map(read, compiled)
    assert problems(minilm, other_loads=frozenset({64})) == []
    assert problems(spans, other_loads=frozenset({32})) == []
    assert problems(replace(combine, loads=minilm.loads), other_loads=frozenset({64})) == []  # its loads are few


@pytest.mark.parametrize(("width", "dtype"), [(312, F16), (100, F32), (1024, F32), (4096, BF16)], ids=str)
def test_rows_of_whole_vectors_are_read_in_vectors(width: int, dtype: torch.dtype, compiled: list[Any]) -> None:
    """On its own, Triton only recognises multiples of 16 elements."""
    launch_padded(torch.zeros(1000, 2, width, dtype=dtype))
    assert problems(read(compiled[0]), other_loads=frozenset({64})) == []


@pytest.mark.parametrize("width", [1, 7, 97, 1031])
def test_odd_rows_fit_into_registers(width: int, compiled: list[Any]) -> None:
    launch_padded(torch.zeros(1000, 2, width, dtype=F16), torch.bool)
    code = read(compiled[0])
    assert set(code.loads) <= {8, 16}
    assert problems(replace(code, loads=Counter({128: 4}))) == []  # all but the width of the loads


@pytest.mark.parametrize("width", [384, 97])
def test_the_assembler_keeps_the_width_of_loads(width: int, compiled: list[Any]) -> None:
    launch_padded(torch.zeros(1000, 2, width, dtype=F16))
    in_ptx, in_sass = ptx_loads(compiled[0].asm["ptx"]), sass_loads(compiled[0].asm["cubin"])
    assert set(in_sass) == set(in_ptx) == {64, 128 if width == 384 else 16}


def test_lengths_and_batches_do_not_recompile(compiled: list[Any]) -> None:
    for batch, length in [(1000, 1), (1000, 16), (1001, 17), (3000, 30)]:
        launch_padded(torch.zeros(batch, length, 40, dtype=F16))
    assert len({kernel.hash for kernel in compiled}) == 1


def test_large_tensors_on_amd(compiled: list[Any]) -> None:
    """Below 2 GB AMD's buffer loads take 32-bit offsets; a larger tensor must get others."""
    compile_for(TARGETS[-1])
    memory = torch.empty(2**31, dtype=F16)  # untouched pages take no memory
    launch_padded(memory.as_strided((1000, 2, 384), (2**21, 384, 1)))
    assert "global_load_dwordx4" in compiled[0].asm["amdgcn"]
    assert "buffer_load_dwordx4" not in compiled[0].asm["amdgcn"]


# The checks themselves: each must see what it is there for. ---------------------------------------


def use_tiles(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tiles], Tiles]) -> None:
    monkeypatch.setattr(launch, "pick_tiles", lambda hidden: change(pick_tiles(hidden)))


NARROW = ["only 0 loads of 128 bits", "loads of [16] bits"]


def test_narrow_loads_are_noticed(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, lambda tiles: replace(tiles, vector=1))
    launch_padded(torch.zeros(1000, 2, 312, dtype=F16))
    assert problems(read(compiled[0]), other_loads=frozenset({64}))[:2] == NARROW


def test_strided_columns_are_noticed(compiled: list[Any]) -> None:
    launch_padded(torch.zeros(1000, 384, 2, dtype=F16).transpose(1, 2))
    assert problems(read(compiled[0]), other_loads=frozenset({64}))[:2] == NARROW


@pytest.mark.parametrize(
    ("target", "block_tokens", "problem"),
    [(A100, 4, "registers"), (A100, 8, "spills"), (TARGETS[-1], 16, "spills")],
    ids=["A100, full", "A100, spilling", "gfx942, spilling"],
)
def test_too_large_tiles_are_noticed(
    target: GPUTarget, block_tokens: int, problem: str, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_for(target)
    use_tiles(monkeypatch, lambda tiles: replace(tiles, num_warps=1, block_tokens=block_tokens))
    launch_padded(torch.zeros(1000, 2, 768, dtype=F16))
    assert problem in " ".join(problems(read(compiled[0]), other_loads=frozenset({64})))


@triton.jit
def narrow_offsets_kernel(source, target, stride):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, 1024)
    tl.store(target + columns, tl.load(source + tl.program_id(0) * stride + columns))


def test_narrow_offsets_are_noticed(compiled: list[Any]) -> None:
    x = torch.zeros(4096)
    code = read(narrow_offsets_kernel.warmup(x, x, 1024, grid=(1,), enable_fp_fusion=False))
    assert any("arith.muli" in problem for problem in problems(code))
    assert any("tt.addptr" in problem for problem in problems(code))
