"""Masked mean pooling with optional L2 normalisation, in one pass over the hidden states.

Two torch custom operators, `sbert_infer::mean_pool` and `sbert_infer::mean_pool_spans`:
torch.compile and torch.export see each as one node. On CUDA and ROCm they run the Triton kernels,
elsewhere the plain torch of reference.py.
"""

from __future__ import annotations

from types import ModuleType

import torch

from sbert_infer.kernels.reference import mean_pool_reference, mean_pool_spans_reference

_HIDDEN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OUT_DTYPES = (torch.float16, torch.float32)
_MASK_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_INDEX_DTYPES = (torch.int32, torch.int64)


def mean_pool(
    hidden: torch.Tensor, mask: torch.Tensor, normalize: bool = False, out_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Average hidden [batch, length, hidden] where mask [batch, length] != 0 -> [batch, hidden].

    Sums are FP32 for any type of `hidden` (FP16, BF16 or FP32). Padding never affects the result,
    even if it is NaN. A row without tokens gives zeros. `normalize` scales rows to unit length.
    `out_dtype` is FP32 or FP16.
    """
    pooled: torch.Tensor = _mean_pool(hidden, mask, normalize, out_dtype)
    return pooled


def mean_pool_spans(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    normalize: bool = False,
    out_dtype: torch.dtype = torch.float32,
    longest: int | None = None,
) -> torch.Tensor:
    """Average tokens starts[i]..ends[i] (exclusive) of hidden [tokens, hidden] -> [spans, hidden].

    Spans may overlap and come in any order. They are cut to the tokens that exist; an empty one
    gives zeros. `longest`, the number of tokens in the longest span, lets a GPU divide long spans
    among programs. It is a hint: a wrong value only costs time.
    """
    pooled: torch.Tensor = _mean_pool_spans(hidden, starts, ends, normalize, out_dtype, longest)
    return pooled


def mean_pool_packed(
    hidden: torch.Tensor,
    cu_seqlens: torch.Tensor,
    normalize: bool = False,
    out_dtype: torch.dtype = torch.float32,
    longest: int | None = None,
) -> torch.Tensor:
    """Average the sequences packed in hidden [tokens, hidden] -> [sequences, hidden].

    Sequence i is the tokens cu_seqlens[i]..cu_seqlens[i + 1]; for `longest` see `mean_pool_spans`.
    """
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens must have shape [sequences + 1], got {list(cu_seqlens.shape)}")
    return mean_pool_spans(hidden, cu_seqlens[:-1], cu_seqlens[1:], normalize, out_dtype, longest)


# The operators ------------------------------------------------------------------------------------


@torch.library.custom_op("sbert_infer::mean_pool", mutates_args=())
def _mean_pool(hidden: torch.Tensor, mask: torch.Tensor, normalize: bool, out_dtype: torch.dtype) -> torch.Tensor:
    _check_padded(hidden, mask, out_dtype)
    pool = _kernels().launch_mean_pool if hidden.is_cuda else mean_pool_reference
    pooled: torch.Tensor = pool(hidden, mask, normalize=normalize, out_dtype=out_dtype)
    return pooled


@_mean_pool.register_fake
def _(hidden: torch.Tensor, mask: torch.Tensor, normalize: bool, out_dtype: torch.dtype) -> torch.Tensor:
    _check_padded(hidden, mask, out_dtype)
    return hidden.new_empty((hidden.shape[0], hidden.shape[2]), dtype=out_dtype)


@torch.library.custom_op("sbert_infer::mean_pool_spans", mutates_args=())
def _mean_pool_spans(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    normalize: bool,
    out_dtype: torch.dtype,
    longest: int | None,
) -> torch.Tensor:
    _check_spans(hidden, starts, ends, out_dtype)
    if not hidden.is_cuda:
        return mean_pool_spans_reference(hidden, starts, ends, normalize=normalize, out_dtype=out_dtype)
    pooled: torch.Tensor = _kernels().launch_mean_pool_spans(
        hidden, starts, ends, longest=longest, normalize=normalize, out_dtype=out_dtype
    )
    return pooled


@_mean_pool_spans.register_fake
def _(
    hidden: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    normalize: bool,
    out_dtype: torch.dtype,
    longest: int | None,
) -> torch.Tensor:
    _check_spans(hidden, starts, ends, out_dtype)
    return hidden.new_empty((starts.shape[0], hidden.shape[1]), dtype=out_dtype)


def _kernels() -> ModuleType:
    """Import the launchers, on first use on a GPU: nothing else needs Triton."""
    try:
        from sbert_infer.kernels import launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise ModuleNotFoundError("pooling on a GPU needs Triton: pip install triton", name="triton") from error
    return launch


# Checks -------------------------------------------------------------------------------------------


def _check_padded(hidden: torch.Tensor, mask: torch.Tensor, out_dtype: torch.dtype) -> None:
    _check_shape("hidden", hidden, "[batch, length, hidden]")
    _check_shape("mask", mask, "[batch, length]")
    if mask.shape != hidden.shape[:2]:
        raise ValueError(
            f"mask must have shape [batch, length] = {list(hidden.shape[:2])} like hidden, got {list(mask.shape)}"
        )
    _check_types(hidden, out_dtype)
    _check_dtype("mask", mask.dtype, _MASK_DTYPES)
    _check_device(hidden, mask=mask)


def _check_spans(hidden: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out_dtype: torch.dtype) -> None:
    _check_shape("hidden", hidden, "[tokens, hidden]")
    _check_shape("starts", starts, "[spans]")
    _check_shape("ends", ends, "[spans]")
    if starts.shape != ends.shape:
        raise ValueError(f"starts and ends must be equally many, got {starts.shape[0]} and {ends.shape[0]}")
    _check_types(hidden, out_dtype)
    _check_dtype("starts", starts.dtype, _INDEX_DTYPES)
    _check_dtype("ends", ends.dtype, _INDEX_DTYPES)
    _check_device(hidden, starts=starts, ends=ends)


def _check_shape(name: str, tensor: torch.Tensor, wanted: str) -> None:
    if tensor.ndim != len(wanted.split(",")):
        raise ValueError(f"{name} must have shape {wanted}, got {list(tensor.shape)}")


def _check_types(hidden: torch.Tensor, out_dtype: torch.dtype) -> None:
    _check_dtype("hidden", hidden.dtype, _HIDDEN_DTYPES)
    _check_dtype("out_dtype", out_dtype, _OUT_DTYPES)


def _check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        raise TypeError(f"{name} must be one of {', '.join(map(str, allowed))}, got {dtype}")


def _check_device(hidden: torch.Tensor, **others: torch.Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != hidden.device:
            raise ValueError(f"{name} must be on the device of hidden, {hidden.device}, got {tensor.device}")
