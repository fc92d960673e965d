"""What the pooling kernels must compute, in plain torch, on any device and without Triton."""

from __future__ import annotations

import torch

__all__ = ["mean_pool_reference", "mean_pool_spans_reference"]


def mean_pool_reference(
    hidden: torch.Tensor, mask: torch.Tensor, *, normalize: bool = False, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Average hidden [batch, length, hidden] where mask [batch, length] != 0 -> [batch, hidden].

    Computes in FP32, or in FP64 if given FP64. A row without tokens gives zeros.
    """
    keep = mask != 0  # [batch, length]
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    total = wide.masked_fill(~keep[:, :, None], 0).sum(1)  # not multiplied by 0: NaN in padding must not leak
    mean = total / keep.sum(1, keepdim=True).clamp(min=1)  # equivalent to sentence-transformers' clamp at 1e-9
    if normalize:
        mean = torch.nn.functional.normalize(mean, dim=1)
    return mean.to(out_dtype)


def mean_pool_spans_reference(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    normalize: bool = False,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Average the rows starts[i]..ends[i] of hidden [tokens, hidden] -> [spans, hidden].

    Spans are cut to the tokens that exist; an empty one gives zeros. They are copied out and
    padded: simple, at the cost of memory.
    """
    starts, ends = starts.long().clamp(min=0), ends.long().clamp(max=len(hidden))
    longest = int((ends - starts).max().clamp(min=0)) if len(starts) else 0
    tokens = starts[:, None] + torch.arange(longest, device=hidden.device)  # [spans, longest]
    keep = tokens < ends[:, None]
    padded = hidden[tokens.where(keep, 0)]  # [spans, longest, hidden]
    return mean_pool_reference(padded, keep, normalize=normalize, out_dtype=out_dtype)
