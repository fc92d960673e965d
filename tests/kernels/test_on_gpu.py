"""The kernels on a real GPU, against their reference. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from sbert_infer.kernels.mean_pool import mean_pool, mean_pool_packed, mean_pool_spans
from sbert_infer.kernels.reference import mean_pool_reference, mean_pool_spans_reference

pytestmark = pytest.mark.gpu

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TOLERANCES = {F32: (1e-7, 4e-7), F16: (6e-8, 5e-4)}  # against FP64: (absolute, relative)


def random_batch(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states with NaN in the padding, and their mask."""
    generator = torch.Generator("cuda").manual_seed(0)
    mask = torch.rand(shape[:2], device="cuda", generator=generator) < 0.7
    hidden = torch.randn(shape, device="cuda", generator=generator) + 1  # no row's mean is near zero
    return hidden.masked_fill(~mask[:, :, None], float("nan")).to(dtype), mask


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    atol, rtol = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), wanted, atol=atol, rtol=rtol)


def assert_pools(hidden: torch.Tensor, mask: torch.Tensor, out_dtype: torch.dtype = F32) -> None:
    for normalize in (False, True):
        wanted = mean_pool_reference(hidden.double(), mask, normalize=normalize, out_dtype=torch.float64)
        assert_close(mean_pool(hidden, mask, normalize, out_dtype), wanted)


@pytest.mark.parametrize("out_dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (3, 1, 8), (5, 7, 13), (2, 131, 384), (1, 4099, 768), (700, 300, 312), (64, 128, 1024), (7, 257, 4097)],
    ids=str,
)
def test_padded(shape: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    assert_pools(*random_batch(*shape, dtype=dtype), out_dtype)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_strides(dtype: torch.dtype) -> None:
    hidden, mask = random_batch(6, 150, 96, dtype=dtype)
    assert_pools(hidden.transpose(1, 2).contiguous().transpose(1, 2), mask)
    assert_pools(hidden.transpose(0, 1).contiguous().transpose(0, 1), mask.T.contiguous().T)
    assert_pools(hidden[:, :, 1:], mask)
    assert_pools(hidden[:, ::2, ::3], mask[:, ::2])


@pytest.mark.parametrize("shape", [(3, 5, 384), (3, 300, 384), (300, 5, 384), (3, 5, 2000)], ids=str)
def test_what_is_not_padding_shows(shape: tuple[int, int, int]) -> None:
    """A NaN makes the whole scaled row NaN, but no other row; an empty row stays zero."""
    hidden, mask = torch.randn(shape, device="cuda"), torch.ones(shape[:2], dtype=torch.bool, device="cuda")
    hidden[1, 2, 3], mask[2] = float("nan"), False
    pooled = mean_pool(hidden, mask, normalize=True)
    assert pooled[1].isnan().all()
    assert torch.equal(pooled[2], torch.zeros(shape[2], device="cuda"))
    assert pooled[0].isfinite().all()


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("longest", [None, 1, 1000])
def test_spans(dtype: torch.dtype, longest: int | None) -> None:
    hidden = torch.randn(1000, 384, device="cuda").add(1).to(dtype)
    starts, ends = torch.tensor([[0, 1000], [5, 6], [3, 400], [7, 7], [9, 3], [-4, 2], [900, 2000]], device="cuda").T
    wanted = mean_pool_spans_reference(hidden.double(), starts, ends, out_dtype=torch.float64)
    assert_close(mean_pool_spans(hidden, starts, ends, longest=longest), wanted)
    assert torch.equal(mean_pool_spans(hidden, starts, ends)[3:5], torch.zeros(2, 384, device="cuda"))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    hidden = torch.randn(1000, 300, 384, device="cuda").to(dtype)
    mask = torch.ones(1000, 300, device="cuda")
    many = mean_pool(hidden, mask.bool())
    assert torch.equal(mean_pool(hidden[:1], mask[:1].bool()), many[:1])  # split over programs
    cu_seqlens = torch.arange(0, 300 * 1001, 300, device="cuda")
    assert torch.equal(mean_pool_packed(hidden.flatten(0, 1), cu_seqlens, longest=300), many)


def test_offsets_beyond_32_bits() -> None:
    rows = 2**31 // (512 * 1024) + 2
    if torch.cuda.mem_get_info()[0] < 3 * rows * 512 * 1024:
        pytest.skip("needs 6 GB of free GPU memory")
    hidden = torch.zeros(rows, 512, 1024, dtype=F16, device="cuda")
    hidden[-1] = torch.randn(512, 1024, device="cuda")
    mask = torch.ones(rows, 512, dtype=torch.bool, device="cuda")
    assert_close(mean_pool(hidden, mask)[-1], hidden[-1].double().mean(0))
    ends = torch.tensor([rows * 512], device="cuda")
    assert_close(mean_pool_spans(hidden.flatten(0, 1), ends - 512, ends)[0], hidden[-1].double().mean(0))


def test_follows_the_current_stream() -> None:
    """The input is still being made on a side stream when the kernel is launched there."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    mask = torch.ones(64, 128, dtype=torch.bool, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        hidden = torch.full((64, 128, 384), 3.0, dtype=F16, device="cuda")
        pooled = mean_pool(hidden, mask)
    stream.synchronize()
    assert torch.equal(pooled, torch.full((64, 384), 3.0, device="cuda"))


def test_is_captured_in_a_cuda_graph() -> None:
    hidden, mask = random_batch(8, 300, 384, dtype=F16)
    mean_pool(hidden, mask)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pooled = mean_pool(hidden, mask)
    other, other_mask = random_batch(8, 300, 384, dtype=F16)
    hidden.copy_(other * 2)
    mask.copy_(other_mask)
    graph.replay()
    assert torch.equal(pooled, mean_pool(other * 2, other_mask))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    hidden, mask = random_batch(3, 5, 384, dtype=F16)
    pooled = mean_pool(hidden.to("cuda:1"), mask.to("cuda:1"))
    assert torch.equal(pooled.cpu(), mean_pool(hidden, mask).cpu())


def test_refuses_tensors_on_two_devices() -> None:
    with pytest.raises(ValueError, match="mask must be on the device of hidden, cuda:0, got cpu"):
        mean_pool(torch.ones(1, 2, 3, device="cuda"), torch.ones(1, 2, dtype=torch.bool))
