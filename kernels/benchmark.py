"""`python -m sbert_infer.kernels.benchmark`: pooling's memory throughput against a plain copy.

Pooling computes next to nothing, so the throughput of a copy on the same GPU is its upper limit.
Padded batches are compared with eager torch, packed rows also with what a plan's graph does.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sbert_infer.kernels.mean_pool import mean_pool, mean_pool_spans
from sbert_infer.kernels.reference import mean_pool_reference, mean_pool_spans_reference

# [batch, length, hidden]: MiniLM, BERT base, large; short, typical, long texts; few, many rows.
SHAPES = [(1, 128, 384), (32, 128, 384), (256, 128, 384), (256, 128, 768), (64, 512, 1024), (8, 8192, 768)]
# (rows, length, hidden, tokens of a text): a lone text, then full rows of short and of long ones.
PACKED = [(1, 512, 384, 512), (128, 128, 384, 24), (32, 512, 384, 24), (32, 512, 768, 24), (32, 512, 1024, 500)]
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
    print("\n| rows x length x hidden | texts | dtype | kernel us | GB/s | of copy | eager us | graph us |")
    print("| --- | --: | --- | --: | --: | --: | --: | --: |")
    for packed_shape in PACKED:
        for dtype in (torch.float16, torch.bfloat16):
            print(_packed_row(PackedTokens.make(*packed_shape, dtype=dtype, device="cuda"), copy))
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


@dataclass(frozen=True)
class PackedTokens:
    """Token vectors of rows full of texts."""

    hidden: Tensor  # [rows, length, hidden]
    starts: Tensor  # [texts]: the first token of each, counted through all rows
    ends: Tensor
    segments: int  # the most texts in a row of a plan

    @classmethod
    def make(cls, rows: int, length: int, width: int, tokens: int, *, dtype: torch.dtype, device: str) -> PackedTokens:
        """Fill rows with texts of so many `tokens` each."""
        hidden = torch.randn(rows, length, width, device=device).to(dtype)
        columns = torch.arange(0, length - tokens + 1, tokens, device=device)
        starts = (torch.arange(rows, device=device)[:, None] * length + columns).flatten()
        return cls(hidden, starts, starts + tokens, length // 4)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int((self.ends - self.starts).max())

    def by_kernel(self, longest: int) -> Tensor:
        """Pool as a plan with `--pooling kernel`."""
        return mean_pool_spans(self.hidden.flatten(0, 1), self.starts, self.ends, normalize=True, longest=longest)

    def by_eager(self) -> Tensor:
        """Pool as eager torch does: add each token to the sum of its text."""
        tokens = torch.arange(self.hidden.shape[0] * self.hidden.shape[1], device=self.hidden.device)
        text = torch.searchsorted(self.ends, tokens, right=True)
        inside = tokens >= self.starts[text.clamp(max=len(self.starts) - 1)]
        inside &= text < len(self.starts)
        total = self.hidden.new_zeros((len(self.starts), self.hidden.shape[2]), dtype=torch.float32)
        total.index_add_(0, text[inside], self.hidden.flatten(0, 1)[inside].float())
        return torch.nn.functional.normalize(total / (self.ends - self.starts)[:, None], dim=1)

    def by_graph(self) -> Tensor:
        """Pool as a plan's graph does: a product with each token's share of its text."""
        rows, length, _ = self.hidden.shape
        held = len(self.starts) // rows
        columns = torch.arange(length, device=self.hidden.device)
        first, last = self.hidden.new_zeros((2, rows, self.segments, 1), dtype=torch.int64)
        first[:, :held, 0] = self.starts.view(rows, held) % length
        last[:, :held, 0] = first[:, :held, 0] + (self.ends - self.starts).view(rows, held)
        inside = ((columns >= first) & (columns < last)).float()  # [rows, segments, length]
        shares = (inside / inside.sum(2, keepdim=True).clamp(min=1)).to(self.hidden.dtype)
        mean = (shares @ self.hidden).float() / shares.float().sum(2, keepdim=True).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=2)[:, :held].flatten(0, 1)


def _packed_row(packed: PackedTokens, copy: float) -> str:
    """Render one line of the table of packed rows."""
    longest, hidden = packed.longest, packed.hidden
    pooled = packed.by_kernel(longest)
    wanted = mean_pool_spans_reference(hidden.flatten(0, 1), packed.starts, packed.ends, normalize=True)
    torch.testing.assert_close(pooled, wanted, atol=1e-6, rtol=1e-5)
    kernel = _median_us(lambda: packed.by_kernel(longest))
    eager, graph = _median_us(packed.by_eager), _median_us(packed.by_graph)
    read = int((packed.ends - packed.starts).sum()) * hidden.shape[2] * hidden.element_size()
    gb_per_s = (read + sum(x.numel() * x.element_size() for x in (packed.starts, packed.ends, pooled))) / kernel / 1e3
    name, dtype = " x ".join(map(str, hidden.shape)), str(hidden.dtype).removeprefix("torch.")
    return (
        f"| {name} | {len(packed.starts)} | {dtype} | {kernel:.1f} | {gb_per_s:.0f} | {gb_per_s / copy:.0%} "
        f"| {eager:.1f} | {graph:.1f} |"
    )


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
