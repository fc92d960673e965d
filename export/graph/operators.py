"""The operators that attention and activations become in the graph, chosen while tracing.

transformers lets an attention function be plugged in by name; modules that do not use that
interface are patched by class.

For onnxruntime, our function does no arithmetic: under `torch.export` it puts one
`com.microsoft.MultiHeadAttention` into the graph, with the padding mask as `[batch, length]`
instead of a materialised `[batch, 1, length, length]` bias. Causal attention becomes one
`GroupQueryAttention`, if padding is on the right, where causality hides it. So every architecture
is fused by construction, not by recognising a pattern of nodes that changes with each release.

Everywhere else attention is that of the textbook: two products with a mask and a softmax between
them, the pattern that TensorRT recognises. It adds -1e4 for padding, which FP16 can hold and which
gives no NaN for a row of padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from sbert_infer.errors import ExportError
from sbert_infer.export.graph import deberta
from sbert_infer.export.graph.attention import (
    MASKED,
    add,
    additive,
    attend,
    causal_attention,
    multi_head_attention,
    operator,
    repeated,
    split_heads,
)
from sbert_infer.export.reference.packed import Segments

FUSED, PLAIN = "sbert_infer_fused", "sbert_infer_plain"
MPNET = "modeling_mpnet.MPNetSelfAttention"
CAUSAL_NDIM = 3  # dimensions of a mask that only means causality


@contextmanager
def fused_operators(encoder: nn.Module, *, padding_side: str = "left", max_length: int | None = None) -> Iterator[None]:
    """Within this context, tracing `encoder` emits fused operators; running it is not possible."""
    AttentionInterface.register(FUSED, _attention)
    AttentionMaskInterface.register(FUSED, partial(_mask, padding_side=padding_side, max_length=max_length))
    own_attention = any(_class_name(module) == MPNET for module in encoder.modules())
    with _operators(encoder, None if own_attention else FUSED, _FUSED_PATCHES):
        yield


@contextmanager
def plain_operators(encoder: nn.Module, segments: Segments | None = None) -> Iterator[None]:
    """Within this context, tracing `encoder` emits standard operators; it can also be run.

    With `segments` its rows are packed: a token sees only those of its own segment.
    """
    AttentionInterface.register(PLAIN, _plain_attention)
    AttentionMaskInterface.register(PLAIN, partial(_plain_mask, segments))
    patches: dict[str, Callable[..., Any]]
    patches = {MPNET: partial(_mpnet, attend), deberta.ATTENTION: partial(deberta.plain_attention, segments)}
    with _operators(encoder, PLAIN, patches):
        yield


@contextmanager
def _operators(encoder: nn.Module, attention: str | None, patches: dict[str, Callable[..., Any]]) -> Iterator[None]:
    config: Any = encoder.config
    before = config._attn_implementation
    patched = [module for module in encoder.modules() if _class_name(module) in patches]
    try:
        if attention is not None:
            config._attn_implementation = attention
        for module in patched:
            module.forward = MethodType(patches[_class_name(module)], module)
        with deberta.fixed_positions(encoder):
            yield
    finally:
        config._attn_implementation = before
        for module in patched:
            module.__dict__.pop("forward", None)


def _class_name(module: nn.Module) -> str:
    """The class with its file's name: DeBERTa's two versions have classes of the same name."""
    return f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; `query` is [batch, heads, length, head_dim].

    `key` and `value` may have fewer heads.
    """
    scale = _scale(module, query, options)
    if mask is not None and mask.ndim == CAUSAL_NDIM:
        return causal_attention(query, key, value, scale), None
    padding = mask if mask is not None and mask.ndim == 2 else None
    bias = add(options.get("position_bias"), additive(mask, query.dtype) if padding is None else None)
    return multi_head_attention(query, *repeated(query, key, value), scale, bias, padding), None


def _scale(module: nn.Module, query: Tensor, options: dict[str, Any]) -> float:
    """The scores' scale; options that change them in a way that our operators can't are refused."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ExportError(f"{type(module).__name__} uses '{name}', which is not supported")
    scale = options.get("scaling")
    return query.shape[3] ** -0.5 if scale is None else float(scale)


def _mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    padding_side: str = "left",
    max_length: int | None = None,
    **options: Any,
) -> Tensor | None:
    """The padding mask unchanged, unless attention is also causal or has a sliding window.

    A causal mask with only padding on the right is returned as [batch, 1, length].
    """
    if options.get("mask_function") is bidirectional_mask_function:
        return attention_mask
    window = options.get("local_size")
    is_plain = options.get("allow_is_causal_skip") and (window is None or window >= (max_length or math.inf))
    if is_plain and padding_side == "right" and attention_mask is not None and _head_dim(options) % 8 == 0:
        return attention_mask[:, None, :]
    # None instead of a causal mask would leave causality to our attention, which has none.
    restricted: Tensor | None = sdpa_mask(
        *args, attention_mask=attention_mask, **{**options, "allow_is_causal_skip": False}
    )
    return restricted


def _head_dim(options: dict[str, Any]) -> int:
    """Width of a head, which the operator for causal attention requires to be a multiple of 8."""
    config = options["config"]
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _mpnet(
    attend: Callable[..., Tensor],
    self: Any,
    hidden: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor]:
    """Attention of MPNet, which is not on transformers' attention interface.

    Its scores have a learned bias by relative position. Its mask arrives as [batch, 1, 1, length]
    with large negative numbers for padding, which are clamped, since finfo.min plus a bias would
    overflow to -inf.
    """
    query, key, value = split_heads(self, hidden, self.q, self.k, self.v)
    bias = add(position_bias, None if attention_mask is None else attention_mask.clamp(min=MASKED))
    out = attend(query, key, value, self.attention_head_size**-0.5, bias)
    return (self.o(out.reshape(hidden.shape)),)


def _tanh_gelu(self: Any, x: Tensor) -> Tensor:
    return operator("FastGelu", [x], x)


_FUSED_PATCHES: dict[str, Callable[..., Any]] = {
    MPNET: partial(_mpnet, multi_head_attention),
    deberta.ATTENTION: deberta.fused_attention,
    "activations.NewGELUActivation": _tanh_gelu,
    "activations.FastGELUActivation": _tanh_gelu,
    "activations.GELUTanh": _tanh_gelu,
}


# -------------------------------------------------------------------------------------------------
# standard operators


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; `query` is [batch, heads, length, head_dim].

    `key` and `value` may have fewer heads.
    """
    bias = add(options.get("position_bias"), additive(mask, query.dtype))
    return attend(query, *repeated(query, key, value), _scale(module, query, options), bias), None


def _plain_mask(
    segments: Segments | None, *args: Any, attention_mask: Tensor | None = None, **options: Any
) -> Tensor | None:
    """The mask as a bias for all layers, [batch, 1, 1, length] or [batch, 1, length, length].

    Within a segment, differences of columns are those of positions, so causality and windows need
    no change.
    """
    if segments is not None:
        restricted = _mask(*args, **options)  # None if attention is neither causal nor has a window
        mask: Tensor | None = segments.together if restricted is None else restricted & segments.together
    else:
        mask = _mask(*args, attention_mask=attention_mask, **options)
        if mask is not None and mask.ndim == 2:
            mask = mask[:, None, None, :].to(torch.bool)
    return additive(mask, options.get("dtype", torch.float32))
