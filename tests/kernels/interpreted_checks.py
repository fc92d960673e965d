"""The kernels against their reference, in Triton's interpreter.

Run by test_triton.py in a separate process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer.kernels import launch
from sbert_infer.kernels.launch import CHUNK_TOKENS, launch_mean_pool, launch_mean_pool_spans
from sbert_infer.kernels.reference import mean_pool_reference, mean_pool_spans_reference

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Against the reference in FP64: (absolute, relative). FP16 results may be off by their rounding.
TOLERANCES = {F32: (1e-7, 2e-7), F16: (6e-8, 5e-4)}
# Multiprocessors: on one, each program walks a whole row; on many, rows are split among programs.
SMALL_DEVICE, BIG_DEVICE = 1, 10_000


@pytest.fixture(params=[SMALL_DEVICE, BIG_DEVICE], ids=["small device", "big device"])
def device(request: pytest.FixtureRequest) -> Iterator[int]:
    with device_of(request.param):
        yield request.param


@contextmanager
def device_of(multiprocessors: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_multiprocessors", lambda device: multiprocessors)
        yield


def test_this_is_the_triton_to_check() -> None:
    assert Path(triton.__file__).is_relative_to(os.environ["EXPECTED_TRITON"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_hidden(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed)).to(dtype)


def random_mask(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.rand(shape, generator=generator(seed)) < 0.7


def assert_pools(
    hidden: torch.Tensor, mask: torch.Tensor, *, normalize: bool = False, out_dtype: torch.dtype = F32
) -> None:
    got = launch_mean_pool(hidden, mask, normalize=normalize, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    assert_close(got, mean_pool_reference(hidden.double(), mask, out_dtype=torch.float64), normalize)


def assert_pools_spans(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    longest: int | None = None,
    normalize: bool = False,
    out_dtype: torch.dtype = F32,
) -> None:
    got = launch_mean_pool_spans(hidden, starts, ends, longest=longest, normalize=normalize, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    assert_close(got, mean_pool_spans_reference(hidden.double(), starts, ends, out_dtype=torch.float64), normalize)


def assert_close(got: torch.Tensor, mean: torch.Tensor, normalize: bool) -> None:
    """Compare unit vectors at the scale of a small mean: rounding is relative to what was added."""
    atol, rtol = TOLERANCES[got.dtype]
    wanted, scale = mean, torch.ones(())
    if normalize:
        norm = mean.norm(dim=1, keepdim=True)
        wanted, scale = torch.nn.functional.normalize(mean, dim=1), torch.where(norm < 1, norm, 1)
    torch.testing.assert_close(got.double() * scale, wanted * scale, atol=atol, rtol=rtol, equal_nan=True)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1), F32),
        ((3, 1, 8), F16),
        ((5, 7, 13), BF16),
        ((2, 131, 384), F16),  # more than one chunk of tokens
        ((1, 300, 64), BF16),
        ((2, 17, 768), F32),
        ((2, 3, 1031), F16),  # more than one block of columns
        ((1, 130, 1032), F16),
    ],
    ids=str,
)
def test_padded(shape: tuple[int, int, int], dtype: torch.dtype, normalize: bool, device: int) -> None:
    assert_pools(random_hidden(*shape, dtype=dtype), random_mask(*shape[:2]), normalize=normalize)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_half_precision_out(dtype: torch.dtype, normalize: bool, device: int) -> None:
    hidden, mask = random_hidden(1, 140, 40, dtype=dtype), random_mask(1, 140)
    assert_pools(hidden, mask, normalize=normalize, out_dtype=F16)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_mask_types(dtype: torch.dtype) -> None:
    assert_pools(random_hidden(3, 11, 16), random_mask(3, 11).to(dtype))


def test_any_mask_value_but_zero_keeps() -> None:
    hidden, mask = random_hidden(2, 5, 8), torch.tensor([[1, 2, -1, 0, 0], [0, 256, 0, 1 << 40, 0]])
    assert_pools(hidden, mask)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("normalize", [False, True])
def test_padding_never_leaks(poison: float, normalize: bool, device: int) -> None:
    hidden, mask = random_hidden(4, 140, 40), random_mask(4, 140)
    mask[3] = False
    clean = launch_mean_pool(hidden, mask, normalize=normalize, out_dtype=F32)
    poisoned = hidden.masked_fill(~mask[:, :, None], poison)
    assert torch.equal(launch_mean_pool(poisoned, mask, normalize=normalize, out_dtype=F32), clean)
    assert clean.isfinite().all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [40, 1031])
def test_what_is_not_padding_shows(poison: float, width: int, device: int) -> None:
    """A NaN makes its column NaN, or the whole row once it is scaled, but no other row."""
    hidden, mask = random_hidden(3, 5, width), torch.ones(3, 5)
    hidden[1, 2, 3] = poison
    for normalize in (False, True):
        assert_pools(hidden, mask.bool(), normalize=normalize)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("length", "width"), [(131, 24), (9, 1032)])
def test_empty_rows_are_zeros(normalize: bool, length: int, width: int, device: int) -> None:
    mask = random_mask(4, length)
    mask[1:3] = False
    pooled = launch_mean_pool(random_hidden(4, length, width), mask, normalize=normalize, out_dtype=F32)
    assert torch.equal(pooled[1:3], torch.zeros(2, width))
    assert (pooled[[0, 3]] != 0).all()


@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (0, 0, 8), (2, 5, 0)], ids=str)
def test_no_elements(shape: tuple[int, int, int]) -> None:
    pooled = launch_mean_pool(torch.ones(shape), torch.ones(shape[:2]).bool(), normalize=True, out_dtype=F32)
    assert torch.equal(pooled, torch.zeros(shape[0], shape[2]))


def strided(kind: str, batch: int, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states [batch, length, width] in a layout that is not the usual one."""
    if kind == "hidden first":
        return random_hidden(width, batch, length, dtype=dtype).permute(1, 2, 0)
    if kind == "length first":
        return random_hidden(length, batch, width, dtype=dtype).transpose(0, 1)
    if kind == "every second column":
        return random_hidden(batch, length, 2 * width, dtype=dtype)[:, :, ::2]
    if kind == "every third token":
        return random_hidden(batch, 3 * length, width, dtype=dtype)[:, ::3]
    if kind == "one element off":
        return random_hidden(batch * length * width + 1, dtype=dtype)[1:].view(batch, length, width)
    if kind == "columns of a wider one":
        return random_hidden(batch, length, width + 8, dtype=dtype)[:, :, 4 : width + 4]
    assert kind == "one row for all"
    return random_hidden(1, length, width, dtype=dtype).expand(batch, length, width)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "hidden first",
        "length first",
        "every second column",
        "every third token",
        "one element off",
        "columns of a wider one",
        "one row for all",
    ],
)
def test_strides(kind: str, dtype: torch.dtype) -> None:
    assert_pools(strided(kind, 3, 19, 48, dtype), random_mask(3, 19))
    assert_pools_spans(strided(kind, 3, 19, 48, dtype)[1], torch.tensor([0, 3]), torch.tensor([19, 10]))


def test_strides_of_the_mask() -> None:
    hidden = random_hidden(3, 19, 8)
    assert_pools(hidden, random_mask(19, 3).T)
    assert_pools(hidden, random_mask(3, 40)[:, 1:39:2])
    assert_pools(hidden, random_mask(1, 19).expand(3, 19))


def test_offsets_beyond_32_bits() -> None:
    """Rows are 2^30 elements apart: the third starts at 2^31. Untouched pages take no memory."""
    memory = torch.empty(2**31 + 64, dtype=F16)
    hidden = memory.as_strided((3, 2, 8), (2**30, 8, 1))
    hidden.copy_(random_hidden(3, 2, 8, dtype=F16))
    assert_pools(hidden, torch.ones(3, 2, dtype=torch.bool))
    tokens = memory.as_strided((3, 8), (2**30, 1))
    assert_pools_spans(tokens, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("width", "dtype"), [(1, F32), (13, BF16), (384, F16), (1032, F16)], ids=str)
def test_spans(width: int, dtype: torch.dtype, normalize: bool, device: int) -> None:
    """Whole, single, overlapping, empty, turned around, and reaching over either end."""
    starts, ends = torch.tensor([[0, 140], [5, 6], [3, 90], [7, 7], [9, 3], [-4, 2], [130, 999], [400, 500]]).T
    hidden = random_hidden(140, width, dtype=dtype)
    assert_pools_spans(hidden, starts, ends, longest=140, normalize=normalize)


@pytest.mark.parametrize("longest", [None, 0, 130, 300, 1000])
def test_longest_is_only_a_hint(longest: int | None) -> None:
    spans = torch.tensor([[0, 300], [100, 140]], dtype=torch.int32)
    with device_of(BIG_DEVICE):
        assert_pools_spans(random_hidden(300, 24), spans[:, 0], spans[:, 1], longest=longest)


def test_no_spans() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    pooled = launch_mean_pool_spans(random_hidden(5, 8), none, none, longest=0, normalize=True, out_dtype=F32)
    assert pooled.shape == (0, 8)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Alone, in a batch, with more padding, packed, and however many programs share the row."""
    lengths = torch.tensor([270, 1, 129])
    rows = [random_hidden(length, 40, dtype=dtype, seed=length) for length in lengths.tolist()]
    wanted = torch.cat([pool(row[None], torch.ones(1, len(row))) for row in rows])
    batch, mask = torch.zeros(3, 270 + CHUNK_TOKENS, 40, dtype=dtype), torch.zeros(3, 270 + CHUNK_TOKENS)
    for i, row in enumerate(rows):
        batch[i, : len(row)], mask[i, : len(row)] = row, 1
    ends = lengths.cumsum(0)
    for multiprocessors in (SMALL_DEVICE, BIG_DEVICE):
        with device_of(multiprocessors):
            assert torch.equal(pool(batch, mask), wanted)
            packed = launch_mean_pool_spans(
                torch.cat(rows), ends - lengths, ends, longest=270, normalize=False, out_dtype=F32
            )
            assert torch.equal(packed, wanted)


def pool(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return launch_mean_pool(hidden, mask.bool(), normalize=False, out_dtype=F32)


HYPOTHESIS = settings(deadline=None, max_examples=30)
DEVICES = st.sampled_from([SMALL_DEVICE, BIG_DEVICE])


@HYPOTHESIS
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 140), st.integers(1, 70)),
    dtype=st.sampled_from([F16, BF16, F32]),
    out_dtype=st.sampled_from([F16, F32]),
    normalize=st.booleans(),
    multiprocessors=DEVICES,
    seed=st.integers(0, 1000),
)
def test_any_padded(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    normalize: bool,
    multiprocessors: int,
    seed: int,
) -> None:
    hidden, mask = random_hidden(*shape, dtype=dtype, seed=seed), random_mask(*shape[:2], seed=seed + 1)
    hidden = hidden.masked_fill(~mask[:, :, None], float("nan"))
    with device_of(multiprocessors):
        assert_pools(hidden, mask, normalize=normalize, out_dtype=out_dtype)


@HYPOTHESIS
@given(
    tokens=st.integers(0, 140),
    width=st.integers(1, 70),
    spans=st.lists(st.tuples(st.integers(-5, 150), st.integers(-5, 150)), max_size=3),
    longest=st.none() | st.integers(0, 300),
    dtype=st.sampled_from([F16, BF16, F32]),
    normalize=st.booleans(),
    multiprocessors=DEVICES,
)
def test_any_spans(
    tokens: int,
    width: int,
    spans: list[tuple[int, int]],
    longest: int | None,
    dtype: torch.dtype,
    normalize: bool,
    multiprocessors: int,
) -> None:
    starts, ends = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).T
    hidden = random_hidden(tokens, width, dtype=dtype)
    with device_of(multiprocessors):
        assert_pools_spans(hidden, starts, ends, longest=longest, normalize=normalize)
