"""The kernels touch nothing outside their buffers, in Triton's interpreter.

Run by test_triton.py in a separate process. Every buffer stands in the middle of a larger one that
is filled with a sentinel: NaN, or a number that no index may be. Each address that a kernel reads
or writes is checked to be that of an element, and the sentinels to be there afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from sbert_infer.kernels import launch
from sbert_infer.kernels.launch import launch_mean_pool, launch_mean_pool_spans
from sbert_infer.kernels.reference import mean_pool_reference, mean_pool_spans_reference

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
AROUND = 64  # elements of sentinel before and after
TRAP = 7_777_777  # for indices and masks


def test_this_is_the_triton_to_check() -> None:
    assert Path(triton.__file__).is_relative_to(os.environ["EXPECTED_TRITON"])


@dataclass
class Buffer:
    """Memory with sentinels around its elements."""

    memory: torch.Tensor
    writable: bool
    elements: npt.NDArray[np.bool_] = field(init=False)  # which of the memory are not sentinels

    def __post_init__(self) -> None:
        self.elements = np.zeros(len(self.memory), np.bool_)
        self.memory.fill_(self.sentinel)

    @property
    def sentinel(self) -> float:
        dtype = self.memory.dtype
        return float("nan") if dtype.is_floating_point else min(TRAP, torch.iinfo(dtype).max)

    def has(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of the addresses are those of elements."""
        places, rest = np.divmod(addresses - self.memory.data_ptr(), self.memory.element_size())
        inside = (places >= 0) & (places < len(self.elements)) & (rest == 0)
        found: npt.NDArray[np.bool_] = inside & self.elements[np.where(inside, places, 0)]
        return found

    def whole(self) -> bool:
        """Return whether all sentinels are there."""
        around = self.memory[torch.from_numpy(~self.elements)]
        return bool((around.isnan() if self.memory.dtype.is_floating_point else around == self.sentinel).all())


class Guard:
    """Buffers among sentinels, and a check of every address that a kernel uses."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.wrong: list[str] = []

    def put(self, values: torch.Tensor, *, columns: int = 0) -> torch.Tensor:
        """Return `values` among sentinels, with `columns` of them between one row and the next."""
        shape = (*values.shape[:-1], values.shape[-1] + columns)
        return self._make(shape, values.dtype, values.shape[-1], writable=False).copy_(values)

    def result(self, like: torch.Tensor, shape: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """Replace `Tensor.new_empty`, with which the launchers allocate all that kernels write."""
        if not isinstance(shape, tuple):  # the interpreter's own
            return torch.empty(shape, dtype=dtype or like.dtype)
        return self._make(shape, dtype or like.dtype, shape[-1], writable=True)

    def check(self, pointers: Any, mask: Any, what: str, buffers: list[Buffer]) -> None:
        used = np.broadcast_to(pointers, np.broadcast_shapes(pointers.shape, mask.shape))[mask != 0].astype(np.int64)
        found = np.zeros(used.shape, np.bool_)
        for buffer in buffers:
            found |= buffer.has(used)
        if not found.all():
            self.wrong.append(f"{what} {np.count_nonzero(~found)} elements outside of every buffer")

    def broken(self) -> list[str]:
        """Return what went wrong so far."""
        return self.wrong + ["a sentinel was overwritten" for buffer in self.buffers if not buffer.whole()]

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype, width: int, *, writable: bool) -> torch.Tensor:
        size = int(np.prod(shape))
        buffer = Buffer(torch.empty(size + 2 * AROUND, dtype=dtype), writable)
        buffer.elements[AROUND : AROUND + size].reshape(shape)[..., :width] = True
        self.buffers.append(buffer)
        return buffer.memory[AROUND : AROUND + size].view(shape)[..., :width]


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    guard = Guard()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        guard.check(pointers.data, mask.data, "read", guard.buffers)
        return load(self, pointers, mask, *others)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        guard.check(pointers.data, mask.data, "wrote", [buffer for buffer in guard.buffers if buffer.writable])
        return store(self, pointers, value, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda like, shape, **options: guard.result(like, shape, **options))
    yield guard
    assert guard.broken() == []


@pytest.fixture(params=[1, 10_000], ids=["whole rows", "split rows"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: request.param)


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def packed_spans(rows: int, length: int, segments: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the spans of all segments of packed rows, most of which do not exist."""
    starts, ends = torch.zeros(2, rows, segments, dtype=torch.int64)
    for row in range(rows - 1):  # the last row is empty
        cuts = torch.tensor([0, 1, 1 + length // 2, length - row])
        starts[row, :3], ends[row, :3] = cuts[:-1] + row * length, cuts[1:] + row * length
    return starts.flatten(), ends.flatten()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("width", "columns", "dtype"), [(40, 8, F16), (384, 0, BF16), (13, 3, F32), (1032, 8, BF16)])
def test_segments_of_packed_rows(width: int, dtype: torch.dtype, columns: int, normalize: bool, guard: Guard) -> None:
    rows, length, segments = 3, 140, 12
    values, (starts, ends) = random(rows * length, width, dtype=dtype), packed_spans(rows, length, segments)
    wanted = mean_pool_spans_reference(values, starts, ends, normalize=normalize)
    hidden = guard.put(values, columns=columns)
    spans = guard.put(starts), guard.put(ends)
    found = launch_mean_pool_spans(hidden, *spans, longest=length, normalize=normalize, out_dtype=F32)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    empty = starts == ends
    assert empty.sum() == rows * segments - 3 * (rows - 1)
    assert not found[empty].any()


def test_spans_that_reach_over_the_ends(guard: Guard) -> None:
    values = random(50, 40, dtype=BF16)
    starts, ends = torch.tensor([[-9, 3], [40, 99], [60, 70], [20, 10], [-5, -1]]).T
    wanted = mean_pool_spans_reference(values, starts, ends)
    spans = guard.put(starts.contiguous()), guard.put(ends.contiguous())
    found = launch_mean_pool_spans(guard.put(values), *spans, longest=50, normalize=False, out_dtype=F32)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_a_nan_beside_a_segment_stays_there(guard: Guard) -> None:
    """What stands in a row between its texts, and in rows without any, is never read."""
    values, (starts, ends) = random(3 * 140, 40, dtype=F16), packed_spans(3, 140, 12)
    kept = torch.zeros(len(values), dtype=torch.bool)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        kept[start:end] = True
    assert not kept.all()
    hidden = guard.put(values.masked_fill(~kept[:, None], float("nan")))
    spans = guard.put(starts), guard.put(ends)
    assert launch_mean_pool_spans(hidden, *spans, longest=140, normalize=True, out_dtype=F32).isfinite().all()


@pytest.mark.parametrize(("width", "dtype"), [(40, F16), (13, BF16), (1032, F16)], ids=str)
def test_padded_batches(width: int, dtype: torch.dtype, guard: Guard) -> None:
    values, mask = random(3, 140, width, dtype=dtype), torch.rand(3, 140) < 0.7
    wanted = mean_pool_reference(values, mask, normalize=True)
    found = launch_mean_pool(guard.put(values), guard.put(mask.to(torch.int64)), normalize=True, out_dtype=F32)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


# The guard itself must see what it is there for. --------------------------------------------------


@triton.jit
def careless_kernel(source, target, read, written):  # type: ignore[no-untyped-def]
    places = tl.arange(0, 16)
    tl.store(target + places, tl.load(source + places, mask=places < read, other=0), mask=places < written)


@pytest.mark.parametrize(
    ("read", "written", "problems"), [(16, 13, ["read 3"]), (13, 16, ["wrote 3", "a sentinel was overwritten"])]
)
def test_careless_kernels_are_noticed(read: int, written: int, problems: list[str], guard: Guard) -> None:
    source = guard.put(torch.ones(13))
    careless_kernel[(1,)](source, source.new_empty((13,)), read, written)
    found = guard.broken()
    assert [problem[: len(start)] for problem, start in zip(found, problems, strict=True)] == problems
    guard.wrong.clear()
    guard.buffers.clear()
