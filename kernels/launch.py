"""Launch the pooling kernels on checked tensors. Needs Triton.

`Tiles` says how much of the hidden states one program reads at a time, `Split` how the rows are
divided among programs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from sbert_infer.kernels.mean_pool_triton import mean_pool_combine_kernel, mean_pool_kernel, mean_pool_spans_kernel

__all__ = ["CHUNK_TOKENS", "Split", "Tiles", "launch_mean_pool", "launch_mean_pool_spans", "pick_split", "pick_tiles"]

# Tokens are summed in chunks of this size. It is a constant because the order of the additions must
# not depend on the batch. Most sentences are one chunk, so a single launch pools them; the chunks
# of a long text can go to several programs.
CHUNK_TOKENS = 128

_MAX_BLOCK_HIDDEN = 1024
_MAX_WARPS = 8
_LOADS_PER_THREAD = 2
_MIN_ELEMENTS_PER_THREAD = 8  # narrow loads: more of them are needed to keep memory busy
_WARP = 32
_VECTOR_BYTES = 16  # the widest load of one thread
_MAX_CHUNKS = 65535  # CUDA's limit for the third dimension of a grid


def launch_mean_pool(
    hidden: torch.Tensor, mask: torch.Tensor, *, normalize: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """Pool hidden [batch, length, hidden] where mask [batch, length] != 0 -> [batch, hidden]."""
    tiles = pick_tiles(hidden)
    arguments = {
        "hidden_ptr": hidden,
        "mask_ptr": mask,
        "length": hidden.shape[1],
        "stride_batch": hidden.stride(0) // tiles.vector,
        "stride_token": hidden.stride(1) // tiles.vector,
        "stride_hidden": hidden.stride(2),
        "stride_mask_batch": mask.stride(0),
        "stride_mask_token": mask.stride(1),
    }
    out = hidden.new_empty((hidden.shape[0], hidden.shape[2]), dtype=out_dtype)
    return _launch(mean_pool_kernel, arguments, tiles, out, longest=hidden.shape[1], normalize=normalize)


def launch_mean_pool_spans(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    longest: int | None,
    normalize: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Pool the rows starts[i]..ends[i] of hidden [tokens, hidden] -> [spans, hidden]."""
    tiles = pick_tiles(hidden)
    arguments = {
        "hidden_ptr": hidden,
        "starts_ptr": starts,
        "ends_ptr": ends,
        "tokens": hidden.shape[0],
        "stride_token": hidden.stride(0) // tiles.vector,
        "stride_hidden": hidden.stride(1),
        "stride_starts": starts.stride(0),
        "stride_ends": ends.stride(0),
    }
    out = hidden.new_empty((len(starts), hidden.shape[1]), dtype=out_dtype)
    return _launch(mean_pool_spans_kernel, arguments, tiles, out, longest=longest, normalize=normalize)


def _launch(
    kernel: Any, arguments: dict[str, Any], tiles: Tiles, out: torch.Tensor, *, longest: int | None, normalize: bool
) -> torch.Tensor:
    """Fill `out` by `kernel`, then by the combining kernel where rows are split; return it."""
    rows, width = out.shape
    if not out.numel():
        return out
    split = pick_split(rows, width, longest, tiles, normalize=normalize, multiprocessors=_multiprocessors(out.device))
    chunks = split.grid[2]
    sums = out.new_empty((rows, chunks, width), dtype=torch.float32) if split.combine else None
    counts = out.new_empty((rows, chunks), dtype=torch.int32) if split.combine else None
    columns = {"HIDDEN": width, "BLOCK_HIDDEN": tiles.block_hidden, "NORMALIZE": normalize}
    arguments |= {
        "out_ptr": out if sums is None else sums,
        "counts_ptr": counts,
        "VECTOR": tiles.vector,
        "CHUNK": CHUNK_TOKENS,
        "BLOCK_TOKENS": tiles.block_tokens,
        "FINISH": not split.combine,
    }
    # One stage: a tile already has enough loads in flight. Without fused multiply-add, every
    # version of Triton rounds the same way.
    options = {"num_warps": tiles.num_warps, "num_stages": 1, "enable_fp_fusion": False}
    with _on(out.device):
        _run(kernel, split.grid, **arguments, **columns, **options)
        if split.combine:
            parts = {"sums_ptr": sums, "counts_ptr": counts, "out_ptr": out, "chunks": chunks}
            _run(mean_pool_combine_kernel, (rows, 1, 1), **parts, **columns, **options)
    return out


def _run(kernel: Any, grid: tuple[int, int, int], **arguments: Any) -> None:
    """Launch a kernel on torch's current stream. Every launch goes through here."""
    kernel[grid](**arguments)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current, which is where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors. Triton's interpreter, on the CPU, runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Tiles --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """What one program reads at once: `block_tokens` x `block_hidden` elements."""

    block_tokens: int
    block_hidden: int
    vector: int  # elements in one aligned load
    num_warps: int


def pick_tiles(hidden: torch.Tensor) -> Tiles:
    """Choose tiles for hidden [..., tokens, hidden] by width, type and strides, never by batch.

    A tile is two loads per thread, of 128 bits where strides allow: 8 KB for a program of 8 warps.
    The next tile is loaded while one is added. Registers allow two programs per multiprocessor or
    more, so at least 16 to 32 KB are in flight. An A100 needs about 11 KB to keep its memory busy
    (2039 GB/s x 600 ns / 108), an H100 18 KB. A program holds a whole row of up to 1024 columns, so
    that it can normalise it; lanes beyond the row (384 of 512 are inside) load nothing. Wider rows
    are cut into blocks of columns.
    """
    vector = _vector(hidden)
    block_hidden = min(_power_of_two(hidden.shape[-1]), _MAX_BLOCK_HIDDEN)
    warp_elements = _WARP * max(_LOADS_PER_THREAD * vector, _MIN_ELEMENTS_PER_THREAD)
    num_warps = min(_MAX_WARPS, max(1, CHUNK_TOKENS * block_hidden // warp_elements))
    block_tokens = min(CHUNK_TOKENS, max(1, num_warps * warp_elements // block_hidden))
    return Tiles(block_tokens, block_hidden, vector, num_warps)


@dataclass(frozen=True)
class Split:
    """How a launch is divided: `grid` is (rows, blocks of columns, chunks of tokens)."""

    grid: tuple[int, int, int]
    combine: bool  # a second kernel finishes the rows


def pick_split(
    rows: int, width: int, longest: int | None, tiles: Tiles, *, normalize: bool, multiprocessors: int
) -> Split:
    """Split rows over tokens only where there are too few rows to keep the device busy.

    With two programs per multiprocessor or more, each walks its whole row and finishes it: one
    launch. With fewer, each takes one chunk and a second, small kernel adds the chunks; the hidden
    states are still read once. `longest` is the number of tokens in the longest row. If it is
    unknown, rows are not split; if a row is longer, its last program takes the rest.
    """
    blocks = -(-width // tiles.block_hidden)
    chunks = 1
    if longest is not None and rows * blocks < 2 * multiprocessors:
        chunks = min(max(1, -(-longest // CHUNK_TOKENS)), _MAX_CHUNKS)
    return Split((rows, blocks, chunks), combine=chunks > 1 or (normalize and blocks > 1))


def _vector(hidden: torch.Tensor) -> int:
    """Elements in the widest load that all strides allow: 16 bytes, or a smaller power of two."""
    if hidden.stride(-1) != 1 or hidden.data_ptr() % _VECTOR_BYTES:
        return 1
    # The stride of a dimension of size 1 is never used.
    strides = [stride for size, stride in zip(hidden.shape[:-1], hidden.stride()[:-1], strict=True) if size > 1]
    return gcd(_VECTOR_BYTES // hidden.element_size(), *strides)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
