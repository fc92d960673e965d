"""Attention, as nodes of onnxruntime's own domain and in standard operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MICROSOFT = "com.microsoft::"
MASKED = -1e4  # added to the score of a masked token; its exponential is 0 in FP16 and in FP32


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None = None
) -> Tensor:
    """As `attend`, in one node; `mask` is [batch, length]."""
    batch, heads, length, head_dim = query.shape
    flat = [x.transpose(1, 2).reshape(batch, length, heads * head_dim) for x in (query, key, value)]
    return attention_node(flat, heads, scale, bias, mask).view(batch, length, heads, head_dim)


def attention_node(
    inputs: Sequence[Tensor], heads: int, scale: float, bias: Tensor | None, mask: Tensor | None = None
) -> Tensor:
    """Attention of query, key and value, each [batch, length, hidden]."""
    every = [*inputs, None, None if mask is None else mask.to(torch.int32), bias]
    while every[-1] is None:
        every.pop()
    return operator("MultiHeadAttention", every, inputs[0], num_heads=heads, scale=scale)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """As `attend`, in one causal node; `key` and `value` may have fewer heads.

    The operator's `local_window_size` is not used: its meaning depends on the version of
    onnxruntime.
    """
    batch, heads, length, head_dim = query.shape
    flat = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
    last = torch.arange(length, dtype=torch.int32, device=query.device).amax(dim=0)
    inputs = [*flat, None, None, last.expand(batch), last + 1]
    kept = (batch, key.shape[1], length, head_dim)  # keys and values for a next call, which is never made
    out, _, _ = torch.onnx.ops.symbolic_multi_out(
        f"{MICROSOFT}GroupQueryAttention",
        inputs,
        {"num_heads": heads, "kv_num_heads": key.shape[1], "scale": scale},
        dtypes=[query.dtype] * 3,
        shapes=[flat[0].shape, kept, kept],
        version=1,
    )
    return out.view(batch, length, heads, head_dim)


def operator(name: str, inputs: list[Tensor | None], like: Tensor, **attributes: Any) -> Tensor:
    """One node of onnxruntime's own domain, with an output of the shape and type of `like`."""
    node: Tensor = torch.onnx.ops.symbolic(
        MICROSOFT + name, inputs, attributes, dtype=like.dtype, shape=like.shape, version=1
    )
    return node


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """[batch, heads, length, head_dim] three times -> [batch, length, heads, head_dim].

    `bias` is added to the scores. The query is scaled, not the scores, so that the product is less
    likely to overflow in FP16.
    """
    scores = (query * scale) @ key.transpose(2, 3)  # [batch, heads, length, length]
    if bias is not None:
        scores = scores + bias
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def split_heads(attention: Any, hidden: Tensor, *projections: nn.Module) -> Iterator[Tensor]:
    """The `projections` of [batch, length, hidden], each [batch, heads, length, head_dim]."""
    shape = (*hidden.shape[:2], attention.num_attention_heads, attention.attention_head_size)
    return (project(hidden).view(shape).transpose(1, 2) for project in projections)


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with as many heads as the queries; groups of query heads share one."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, MASKED).to(dtype)


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum, where None means zeros."""
    return a + b if a is not None and b is not None else a if b is None else b
