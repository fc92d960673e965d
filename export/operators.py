"""What attention and activations become in the graph, decided while the model is traced.

transformers lets an attention function be plugged in by name; what is not on that interface is patched by class.

For onnxruntime, our function does no arithmetic: under `torch.export` it puts one `com.microsoft.MultiHeadAttention`
into the graph, with the padding mask as `[batch, length]` instead of a materialised `[batch, 1, length, length]` bias.
So every architecture is fused by construction, not by recognising a pattern of nodes that changes with each release.

For everything else there is the textbook's attention: two products with a mask and a softmax between them, the pattern
that TensorRT recognises. It adds -1e4 for padding, which FP16 can hold, and which gives no NaN for a row of padding.
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

__all__ = ["fused_operators", "plain_operators"]

FUSED, PLAIN = "sbert_infer_fused", "sbert_infer_plain"
MICROSOFT = "com.microsoft::"
MASKED = -1e4  # added to the score of a token that may not be seen; its exponential is 0 in FP16 and in FP32


@contextmanager
def fused_operators(encoder: nn.Module) -> Iterator[None]:
    """Within this context, tracing `encoder` emits fused operators; running it is not possible."""
    AttentionInterface.register(FUSED, _attention)
    AttentionMaskInterface.register(FUSED, _mask)
    own_attention = any(type(module).__name__ == "MPNetSelfAttention" for module in encoder.modules())
    with _operators(encoder, None if own_attention else FUSED, _FUSED_PATCHES):
        yield


@contextmanager
def plain_operators(encoder: nn.Module) -> Iterator[None]:
    """Within this context, tracing `encoder` emits attention in standard operators. It can be run, too."""
    AttentionInterface.register(PLAIN, _plain_attention)
    AttentionMaskInterface.register(PLAIN, _plain_mask)
    with _operators(encoder, PLAIN, {"MPNetSelfAttention": _plain_mpnet}):
        yield


@contextmanager
def _operators(encoder: nn.Module, attention: str | None, patches: dict[str, Callable[..., Any]]) -> Iterator[None]:
    config: Any = encoder.config
    before = config._attn_implementation
    patched = [module for module in encoder.modules() if type(module).__name__ in patches]
    try:
        if attention is not None:
            config._attn_implementation = attention
        for module in patched:
            module.forward = MethodType(patches[type(module).__name__], module)
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
        bias=_sum(options.get("position_bias"), _additive(mask, query.dtype) if padding is None else None),
    )
    return out.view(batch, length, heads, head_dim), None


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as numbers to add."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, MASKED).to(dtype)


def _mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """The padding mask as it is, unless the architecture also restricts who sees whom (causal, sliding window)."""
    if options.get("mask_function") is bidirectional_mask_function:
        return attention_mask
    # None in place of a causal mask would leave the causality to our attention, which knows of none.
    restricted: Tensor | None = sdpa_mask(
        *args, attention_mask=attention_mask, **{**options, "allow_is_causal_skip": False}
    )
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
        attention_mask = attention_mask.clamp(min=MASKED)
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


_FUSED_PATCHES: dict[str, Callable[..., Any]] = {
    "MPNetSelfAttention": _mpnet,
    "NewGELUActivation": _tanh_gelu,
    "FastGELUActivation": _tanh_gelu,
    "GELUTanh": _tanh_gelu,
}


# ------------------------------------------------------------------------------------------------- standard operators


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """`query`, `key`, `value`: [batch, heads, length, head_dim]; `bias` is added to the scores.

    The query is scaled, not the scores: so a product that FP16 can't hold is less likely.
    """
    scores = (query * scale) @ key.transpose(2, 3)  # [batch, heads, length, length]
    if bias is not None:
        scores = scores + bias
    return scores.softmax(dim=-1) @ value


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls. `query`: [batch, heads, length, head_dim]; `key` and `value` may have fewer heads."""
    scale = options.get("scaling")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    bias = _sum(options.get("position_bias"), _additive(mask, query.dtype))
    out = attend(query, key, value, query.shape[3] ** -0.5 if scale is None else float(scale), bias)
    return out.transpose(1, 2), None


def _plain_mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Once for all layers: numbers to add, [batch, 1, 1, length], or [batch, 1, length, length] where it must be."""
    mask = _mask(*args, attention_mask=attention_mask, **options)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None, :].to(torch.bool)
    return _additive(mask, options.get("dtype", torch.float32))


def _plain_mpnet(
    self: Any, hidden: Tensor, attention_mask: Tensor | None = None, position_bias: Tensor | None = None, **_: Any
) -> tuple[Tensor]:
    """As `_mpnet`."""
    heads = (*hidden.shape[:2], self.num_attention_heads, self.attention_head_size)
    query, key, value = (layer(hidden).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
    bias = _sum(position_bias, None if attention_mask is None else attention_mask.clamp(min=MASKED))
    out = attend(query, key, value, self.attention_head_size**-0.5, bias)
    return (self.o(out.transpose(1, 2).reshape(hidden.shape)),)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a + b if a is not None and b is not None else a if b is None else b
