"""Launchers of the pooling kernels: checked tensors in, pooled rows out. They need Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sbert_infer.kernels.mean_pool_triton import mean_pool_combine_kernel, mean_pool_kernel, mean_pool_spans_kernel
from sbert_infer.kernels.tiles import CHUNK_TOKENS, Tiles, pick_split, pick_tiles

__all__ = ["launch_mean_pool", "launch_mean_pool_spans"]


def launch_mean_pool(
    hidden: torch.Tensor, mask: torch.Tensor, *, normalize: bool, out_dtype: torch.dtype
) -> torch.Tensor:
    """Pool hidden [batch, length, hidden] where mask [batch, length] is not 0 -> [batch, hidden]."""
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
    """Run `kernel`, and the second step where rows are shared out among programs; fills and returns `out`."""
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
    # A tile has loads enough without staging. Without fused multiply-add all versions of Triton
    # round alike.
    options = {"num_warps": tiles.num_warps, "num_stages": 1, "enable_fp_fusion": False}
    with _on(out.device):
        _run(kernel, split.grid, **arguments, **columns, **options)
        if split.combine:
            parts = {"sums_ptr": sums, "counts_ptr": counts, "out_ptr": out, "chunks": chunks}
            _run(mean_pool_combine_kernel, (rows, 1, 1), **parts, **columns, **options)
    return out


def _run(kernel: Any, grid: tuple[int, int, int], **arguments: Any) -> None:
    """Every launch goes through here; it is put on torch's current stream."""
    kernel[grid](**arguments)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _multiprocessors(device: torch.device) -> int:
    """How many programs truly run at once. Triton's interpreter, on the CPU, runs one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
