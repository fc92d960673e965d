"""Small random sparse encoders, saved by sentence-transformers itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import (
    Router,
    SparseAutoEncoder,
    SparseStaticEmbedding,
    SpladePooling,
)
from torch import nn

from sbert_infer.export.exporter import ExportOptions
from sbert_infer.export.reference import sparse as sparse_reference
from tests.models.families import WIDTH, randomize, write_transformer

_SMALL = {"num_hidden_layers": 1}


def write_splade(
    folder: Path,
    family: str = "bert",
    *,
    strategy: str = "max",
    activation: str = "relu",
    seed: int = 0,
    max_length: int = 64,
    **options: Any,
) -> Path:
    """A SPLADE model: masked language model and SpladePooling, with options of `SparseEncoder`."""
    modules = _splade(folder, family, strategy, activation, seed, max_length)
    return _save(folder, modules, **options)


def write_csr(folder: Path, *, k: int = 6, normalize: bool = False, **options: Any) -> Path:
    """A dense encoder followed by a sparse autoencoder."""
    write_transformer(folder, "bert", config=_SMALL)
    encoder = SparseAutoEncoder(WIDTH, hidden_dim=3 * WIDTH, k=k, k_aux=8, normalize=normalize)
    randomize(encoder, 1)
    return _save(folder, [Transformer(str(folder)), Pooling(WIDTH, pooling_mode="mean"), encoder], **options)


def write_routes(folder: Path, **options: Any) -> Path:
    """Documents by SPLADE, queries by a table of weights alone."""
    splade = _splade(folder, "bert", "sum", "log1p_relu", 0, 64)
    tokenizer = splade[0].tokenizer
    weight = torch.rand(len(tokenizer), generator=torch.Generator().manual_seed(3)) * 5
    query = SparseStaticEmbedding(tokenizer=tokenizer, weight=weight)
    return _save(folder, [Router.for_query_document(query_modules=[query], document_modules=splade)], **options)


def _splade(folder: Path, family: str, strategy: str, activation: str, seed: int, max_length: int) -> list[Any]:
    write_transformer(folder, family, seed=seed, max_length=max_length, config=_SMALL)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    randomize(model, seed, 0.15)
    decoder = model.get_output_embeddings()
    with torch.no_grad():  # so that most of a vector is zero, as in a trained model
        decoder.weight.mul_(0.2)
        decoder.bias.sub_(1.0)
    model.save_pretrained(folder)
    pooling = SpladePooling(pooling_strategy=strategy, activation_function=activation)
    return [Transformer(str(folder), transformer_task="fill-mask"), pooling]


def _save(folder: Path, modules: list[nn.Module], **options: Any) -> Path:
    model = SparseEncoder(modules=modules, device="cpu", **options)
    shutil.rmtree(folder)
    model.save(str(folder), create_model_card=False)
    return folder


def splade_checkpoint(once: Callable[..., Path]) -> Path:
    """A SPLADE model, the same for all tests. Shared: change only a copy."""
    prompts = {"query": "find: ", "document": ""}
    return once("splade", "splade", lambda folder: write_splade(folder, prompts=prompts))


def splade_onnx(once: Callable[..., Path], *, int8: bool = False) -> Path:
    """Its artifact. Shared: change only a copy."""
    from tests.models.exports import export_graph, write_graph

    def write_sliced(target: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_reference, "_SLICE", 100)
            write_graph(source, "fused", target)

    source = splade_checkpoint(once)
    graph = once("splade graph", "graph.onnx", write_sliced)
    # Rounding a few random weights says nothing about a trained model.
    options = ExportOptions(int8=int8, min_cosine=0.9 if int8 else None)
    key = f"splade artifact {int8}"
    return once(key, "splade.onnx", lambda target: export_graph(source, target, options, lambda kind: graph))


def assert_same(found: Any, right: np.ndarray[Any, Any]) -> None:
    """A CSR matrix against dense vectors: the same dimensions are active, except near zero."""
    assert found.format == "csr"
    assert found.dtype == np.float32
    assert found.has_sorted_indices
    assert np.all(found.data != 0)
    np.testing.assert_allclose(found.toarray(), right, rtol=0, atol=1e-5)
    active = np.abs(right) > 1e-5
    assert np.all(found.toarray()[active] != 0)
    assert found.nnz <= (right != 0).sum() + right.size // 1000
