"""bge-m3: dense, sparse and multi-vector output in one pass.

The reference for the two layers that sentence-transformers does not know is plain torch, written
here, on the same random weights; it follows the model's own description.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from sbert_infer import Engine
from sbert_infer.errors import CheckpointError, ExportError, SbertInferWarning, TruncationError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.exporter import ExportOptions, export
from tests.models.checkpoints import ODD_TEXTS, TEXTS

Layers = dict[str, dict[str, torch.Tensor]]
Exported = tuple[Path, Path, Layers]

OUTPUTS = ("sentence", "sparse", "multi")
ALL_TEXTS = [*TEXTS, *ODD_TEXTS, "the the the cat the cat"]


@pytest.fixture(scope="module")
def exported(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A checkpoint in bge-m3's layout, its artifact, and the two layers."""
    folder = tmp_path_factory.mktemp("m3") / "tiny-m3"
    shutil.copytree(make_checkpoint("xlm-roberta", pooling=("cls",), max_length=32), folder)
    generator = torch.Generator().manual_seed(5)
    layers = {
        name: {"weight": 0.2 * torch.randn(rows, 32, generator=generator), "bias": torch.full((rows,), 0.1)}
        for name, rows in (("sparse_linear.pt", 1), ("colbert_linear.pt", 24))
    }
    for name, layer in layers.items():
        torch.save(layer, folder / name)
    export(folder, path := folder.with_suffix(".onnx"), ExportOptions(outputs=OUTPUTS))
    return folder, path, layers


def plain(model: SentenceTransformer, layers: Layers, text: str) -> tuple[dict[int, float], Any]:
    """Eager weights of a text's words, and vectors of its tokens except the first."""
    tokenizer: Any = model.tokenizer
    ids = tokenizer([text], truncation=True)["input_ids"][0]
    (hidden,) = model.encode([text], output_value="token_embeddings")
    sparse, multi = layers["sparse_linear.pt"], layers["colbert_linear.pt"]
    scores = torch.relu(hidden @ sparse["weight"].T + sparse["bias"])[:, 0].tolist()
    special = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    weights: dict[int, float] = {}
    for token, score in zip(ids, scores, strict=True):
        if token not in special and score > 0:
            weights[token] = max(score, weights.get(token, 0.0))
    vectors = torch.nn.functional.normalize(hidden[1:] @ multi["weight"].T + multi["bias"], dim=-1)
    return weights, vectors.numpy()


def test_one_pass(exported: Exported) -> None:
    folder, path, layers = exported
    model = SentenceTransformer(str(folder), device="cpu")
    with Engine(path, on_truncate="ignore") as engine:
        found = engine.encode_all(ALL_TEXTS)
        np.testing.assert_allclose(found.dense, model.encode(ALL_TEXTS), rtol=0, atol=1e-5)
        np.testing.assert_allclose(found.dense, engine.encode(ALL_TEXTS), rtol=0, atol=1e-5)
        assert found.sparse.shape == (len(ALL_TEXTS), len(model.tokenizer))
        assert found.sparse.nnz > 20  # or the comparison says little
        for row, text in enumerate(ALL_TEXTS):
            weights, vectors = plain(model, layers, text)
            of_row = found.sparse[row]
            assert dict(zip(of_row.indices.tolist(), of_row.data.tolist(), strict=True)) == pytest.approx(
                weights, rel=0, abs=1e-5
            )
            np.testing.assert_allclose(found.multi[row], vectors, rtol=0, atol=1e-5)
        assert engine.encode_all([]).sparse.shape[0] == 0
        with pytest.raises(TypeError, match="a list of texts"):
            engine.encode_all("one")


def test_prompts_and_truncation(exported: Exported) -> None:
    path = exported[1]
    with Engine(path) as engine:
        assert np.allclose(engine.encode_all(["b"], prompt="a ").dense, engine.encode_all(["a b"]).dense)
        with pytest.warns(SbertInferWarning, match="1 of 2 texts were cut to 32 tokens"):
            engine.encode_all(["short", "long " * 99])
        with pytest.raises(TypeError, match="encode_all needs a list of texts, got one str"):
            engine.encode_all("a text")
    with Engine(path, on_truncate="ignore") as engine, engine.truncate_embeddings(8):
        np.testing.assert_allclose(engine.encode_all(TEXTS).dense, engine.encode(TEXTS), rtol=0, atol=1e-6)
    with Engine(path, on_truncate="error") as engine, pytest.raises(TruncationError, match="text 1 "):
        engine.encode_all(["short", "long " * 99])


def test_refused(exported: Exported, tmp_path: Path, small_checkpoint: Path) -> None:
    with pytest.raises(ExportError, match="go together: sentence,sparse,multi"):
        ExportOptions(outputs=("sentence", "sparse"))
    options = ExportOptions(outputs=OUTPUTS)
    with pytest.raises(CheckpointError, match=r"sparse_linear.pt is missing[\s\S]*colbert_linear.pt is missing"):
        export(small_checkpoint, tmp_path / "x.onnx", options)
    folder = shutil.copytree(exported[0], tmp_path / "m3")
    torch.save({"weight": torch.zeros(1, 7), "bias": torch.zeros(1)}, folder / "sparse_linear.pt")
    (folder / "colbert_linear.pt").write_bytes(b"\x80\x02cos\nsystem\n.")
    with pytest.raises(CheckpointError, match=r"must hold a weight \[1, 32\][\s\S]*can't be read safely"):
        export(folder, tmp_path / "x.onnx", options)
    assert read_checkpoint(folder).dim == 32  # they are no part of it unless asked for


@pytest.fixture
def small_checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """One without such layers."""
    return make_checkpoint("xlm-roberta", pooling=("cls",), max_length=32)
