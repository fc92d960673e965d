"""`python -m sbert_infer.kernels.benchmark`: pooling's memory throughput against a plain copy.

Pooling computes next to nothing, so the throughput of a copy on the same GPU is its upper limit.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import torch

from sbert_infer.kernels.mean_pool import mean_pool
from sbert_infer.kernels.reference import mean_pool_reference

__all__ = ["main"]

# [batch, length, hidden]: MiniLM, BERT base, large; short, typical, long texts; few, many rows.
SHAPES = [(1, 128, 384), (32, 128, 384), (256, 128, 384), (256, 128, 768), (64, 512, 1024), (8, 8192, 768)]
COPY_BYTES = 1 << 29


def main() -> int:
    """Print the table; exit with 1 without a GPU, or if the kernel disagrees with its reference."""
    if not torch.cuda.is_available():
        print("no GPU found: this benchmark runs on CUDA or ROCm only", file=sys.stderr)
        return 1
    import triton

    copy = _copy_gb_per_s()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, {platform.platform()}"
    )
    print(f"device copy: {copy:.0f} GB/s read and written\n")
    print("| batch x length x hidden | dtype | kernel us | GB/s | of copy | eager us | eager / kernel |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for shape in SHAPES:
        for dtype in (torch.float16, torch.float32):
            print(_row(shape, dtype, copy))
    return 0


def _row(shape: tuple[int, int, int], dtype: torch.dtype, copy: float) -> str:
    """Render one line of the table. All tokens are kept, so that the bytes are known."""
    hidden = torch.randn(shape, device="cuda").to(dtype)
    mask = torch.ones(shape[:2], dtype=torch.int64, device="cuda")
    pooled = mean_pool(hidden, mask, normalize=True)
    torch.testing.assert_close(pooled, mean_pool_reference(hidden, mask, normalize=True), atol=1e-6, rtol=1e-5)
    kernel = _median_us(lambda: mean_pool(hidden, mask, normalize=True))
    eager = _median_us(lambda: _eager(hidden, mask))
    gb_per_s = sum(x.numel() * x.element_size() for x in (hidden, mask, pooled)) / kernel / 1e3
    name = " x ".join(map(str, shape))
    return (
        f"| {name} | {str(dtype).removeprefix('torch.')} | {kernel:.1f} | {gb_per_s:.0f} | {gb_per_s / copy:.0%} "
        f"| {eager:.1f} | {eager / kernel:.1f} |"
    )


def _eager(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Pool as sentence-transformers does: multiply by the mask, then sum in FP32."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)  # [batch, length, 1]
    total = (hidden * weights).sum(1, dtype=torch.float32)
    count = weights.sum(1, dtype=torch.float32).clamp(min=1e-9)
    return torch.nn.functional.normalize(total / count, dim=1)


def _copy_gb_per_s() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _median_us(lambda: target.copy_(source)) / 1e3


def _median_us(call: Callable[[], object]) -> float:
    """Median time of a call, with the L2 cache emptied before each one."""
    from triton.testing import do_bench

    return 1e3 * float(do_bench(call, return_mode="median"))


if __name__ == "__main__":
    sys.exit(main())
