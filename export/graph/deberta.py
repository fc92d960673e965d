"""DeBERTa's scores by relative position, as a bias to add to those of ordinary attention.

Its scores are `(q . k + q . position_key + k . position_query) * scale`, the last two looked up by
the distance of the tokens. The position vectors depend on the weights alone, so they are computed
once, not in each batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sbert_infer.export.graph.attention import add, additive, attend, attention_node, split_heads
from sbert_infer.export.reference.packed import Segments

ATTENTION = "modeling_deberta_v2.DisentangledSelfAttention"


@contextmanager
def fixed_positions(encoder: nn.Module) -> Iterator[None]:
    """Give each of DeBERTa's attention modules `position_keys` and `position_queries` meanwhile."""
    stacks: list[Any] = [module for module in encoder.modules() if type(module).__name__ == "DebertaV2Encoder"]
    pairs = [(stack.get_rel_embedding(), layer.attention.self) for stack in stacks for layer in stack.layer]
    try:
        for embeddings, attention in pairs:
            _fix(attention, embeddings)
        yield
    finally:
        for _, attention in pairs:
            for name in ("position_keys", "position_queries"):
                attention.__dict__.pop(name, None)


@torch.no_grad()
def _fix(attention: Any, embeddings: Tensor | None) -> None:
    if not attention.relative_attention or embeddings is None:
        return
    shared = attention.share_att_key
    rows = embeddings[: 2 * attention.pos_ebd_size]  # [2 * span, hidden]
    for name, kind, own in (("position_keys", "c2p", "pos_key_proj"), ("position_queries", "p2c", "pos_query_proj")):
        if kind in attention.pos_att_type:
            project = getattr(attention, {"c2p": "key_proj", "p2c": "query_proj"}[kind] if shared else own)
            heads = project(rows).view(len(rows), attention.num_attention_heads, -1)
            # [heads, head_dim, 2 * span]. They are scaled here, not the queries and keys in the
            # graph: TensorRT fuses attention only if nothing else uses its scaled queries.
            attention.__dict__[name] = (heads.permute(1, 2, 0) * score_scale(attention)).contiguous().detach()


def score_scale(attention: Any) -> float:
    """The factor of every score."""
    kinds = 1 + ("c2p" in attention.pos_att_type) + ("p2c" in attention.pos_att_type)
    return float((attention.attention_head_size * kinds) ** -0.5)


def relative_bias(attention: Any, query: Tensor, key: Tensor, relative: Tensor | None) -> Tensor | None:
    """The bias to add to the scores, [batch, heads, length, length], already scaled.

    `query`, `key`: [batch, heads, length, head_dim]; `relative`: [1, length, length].
    """
    if not attention.relative_attention or relative is None:
        return None
    span = attention.pos_ebd_size
    shape = (*query.shape[:3], query.shape[2])
    bias = None
    if "c2p" in attention.pos_att_type:
        index = (relative.long() + span).clamp(0, 2 * span - 1)
        scores = query @ attention.position_keys  # [batch, heads, length, 2 * span]
        bias = scores.gather(-1, index.unsqueeze(0).expand(shape))
    if "p2c" in attention.pos_att_type:
        index = (span - relative.long()).clamp(0, 2 * span - 1)
        scores = key @ attention.position_queries
        other = scores.gather(-1, index.unsqueeze(0).expand(shape)).transpose(2, 3)
        bias = other if bias is None else bias + other
    return bias


def fused_attention(
    self: Any, hidden: Tensor, attention_mask: Tensor, *_: Any, relative_pos: Tensor | None = None, **__: Any
) -> tuple[Tensor, None]:
    """Attention of DeBERTa, which is not on transformers' attention interface.

    Its mask arrives as [batch, 1, length, length], true for pairs of real tokens. The node gets the
    projections before they are split into heads: since the bias uses the heads as well, going back
    from them would stay in the graph.
    """
    flat = self.query_proj(hidden), self.key_proj(hidden), self.value_proj(hidden)
    heads = (*hidden.shape[:2], self.num_attention_heads, self.attention_head_size)
    query, key = (x.view(heads).transpose(1, 2) for x in flat[:2])
    bias = add(relative_bias(self, query, key, relative_pos), additive(attention_mask.bool(), hidden.dtype))
    return attention_node(flat, heads[2], score_scale(self), bias), None


def plain_attention(
    segments: Segments | None,
    self: Any,
    hidden: Tensor,
    attention_mask: Tensor,
    *_: Any,
    relative_pos: Tensor | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """As `fused_attention`, in standard operators; with `segments`, within those."""
    query, key, value = split_heads(self, hidden, self.query_proj, self.key_proj, self.value_proj)
    mask = attention_mask.bool() if segments is None else segments.together
    bias = add(relative_bias(self, query, key, relative_pos), additive(mask, hidden.dtype))
    return attend(query, key, value, score_scale(self), bias).reshape(hidden.shape), None
