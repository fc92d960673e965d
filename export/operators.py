"""Operators of onnxruntime, put into the graph while the model is traced.

transformers lets an attention function be plugged in by name. Ours does no arithmetic: under `torch.export` it puts one
`com.microsoft.MultiHeadAttention` into the graph, with the padding mask as `[batch, length]` instead of a materialised
`[batch, 1, length, length]` bias. So every architecture on transformers' attention interface is fused by construction,
not by recognising a pattern of nodes that changes with each release. The rest is patched by class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

__all__ = ["fused_operators"]

NAME = "sbert_infer_fused"
MICROSOFT = "com.microsoft::"


@contextmanager
def fused_operators(encoder: nn.Module) -> Iterator[None]:
    """Within this context, tracing `encoder` emits fused operators; running it is not possible."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    config: Any = encoder.config
    before = config._attn_implementation
    patched = [module for module in encoder.modules() if type(module).__name__ in _PATCHES]
    try:
        if not any(type(module).__name__ == "MPNetSelfAttention" for module in patched):
            config._attn_implementation = NAME
        for module in patched:
            module.forward = MethodType(_PATCHES[type(module).__name__], module)
        yield
    finally:
        config._attn_implementation = before
        for module in patched:
            module.__dict__.pop("forward", None)


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, *, heads: int, scale: float, mask: Tensor | None, bias: Tensor | None
) -> Tensor:
    """One attention node. `query`, `key`, `value`: [batch, length, hidden]; `mask`: [batch, length]."""
    inputs = [query, key, value, None, None if mask is None else mask.to(torch.int32), bias]
    while inputs[-1] is None:
        inputs.pop()
    return _operator("MultiHeadAttention", inputs, query, num_heads=heads, scale=scale)


def _operator(name: str, inputs: list[Tensor | None], like: Tensor, **attributes: Any) -> Tensor:
    """One node of onnxruntime's own domain, with an output of the shape and type of `like`."""
    node: Tensor = torch.onnx.ops.symbolic(
        MICROSOFT + name, inputs, attributes, dtype=like.dtype, shape=like.shape, version=1
    )
    return node


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls. `query`, `key`, `value`: [batch, heads, length, head_dim]."""
    batch, heads, length, head_dim = query.shape
    scale = options.get("scaling")
    padding = mask if mask is not None and mask.ndim == 2 else None
    out = multi_head_attention(
        *(x.transpose(1, 2).reshape(batch, length, heads * head_dim) for x in (query, key, value)),
        heads=heads,
        scale=head_dim**-0.5 if scale is None else float(scale),
        mask=padding,
        bias=_additive(mask, query.dtype) if padding is None else None,
    )
    return out.view(batch, length, heads, head_dim), None


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean [batch, 1, length, length] mask as numbers to add. -1e4, not -inf: a row of padding gives no NaN."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, -1e4).to(dtype)


def _mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """The padding mask as it is, unless the architecture also restricts who sees whom (causal, sliding window)."""
    if options.get("mask_function") is bidirectional_mask_function:
        return attention_mask
    restricted: Tensor | None = sdpa_mask(*args, attention_mask=attention_mask, **options)
    return restricted


def _mpnet(
    self: Any, hidden: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None, **_: Any
) -> tuple[Tensor]:
    """MPNet is not on transformers' attention interface: its scores carry a learned bias by relative position.

    Its mask arrives as [batch, 1, 1, length], large negative numbers where there is padding. Clamped, since padding
    of finfo.min plus a bias would overflow to -inf.
    """
    bias = None if position_bias is None else position_bias.expand(hidden.shape[0], -1, -1, -1)
    if attention_mask is not None:
        attention_mask = attention_mask.clamp(min=-1e4)
        bias = attention_mask if bias is None else bias + attention_mask  # [batch, heads, length, length]
    out = multi_head_attention(
        self.q(hidden),
        self.k(hidden),
        self.v(hidden),
        heads=self.num_attention_heads,
        scale=self.attention_head_size**-0.5,
        mask=None,
        bias=bias,
    )
    return (self.o(out),)


def _tanh_gelu(self: Any, x: Tensor) -> Tensor:
    return _operator("FastGelu", [x], x)


_PATCHES: dict[str, Callable[..., Any]] = {
    "MPNetSelfAttention": _mpnet,
    "NewGELUActivation": _tanh_gelu,
    "FastGELUActivation": _tanh_gelu,
    "GELUTanh": _tanh_gelu,
}
