"""Exports of sparse encoders: equal to sentence-transformers' `SparseEncoder`, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import SparseEncoder

from sbert_infer import Engine
from sbert_infer.errors import CheckpointError, ExportError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.cli import main
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.reference import sparse as sparse_reference
from sbert_infer.export.reference.encoder import load_reference
from tests.models.checkpoints import ODD_TEXTS, TEXTS, edit_json
from tests.models.sparse_encoders import (
    assert_same,
    splade_checkpoint,
    splade_onnx,
    write_csr,
    write_routes,
    write_splade,
)

Once = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS]


def expected(checkpoint: Path, texts: list[str], **options: Any) -> np.ndarray[Any, Any]:
    """The vectors of sentence-transformers, dense."""
    model = SparseEncoder(str(checkpoint), device="cpu")
    route = options.pop("route", "")
    encode = {"": model.encode, "query": model.encode_query, "document": model.encode_document}[route]
    vectors: np.ndarray[Any, Any] = encode(texts, convert_to_sparse_tensor=False, **options).numpy()
    return vectors


@pytest.fixture(scope="module")
def routes(once: Once) -> Path:
    """Queries by a table of weights, documents by SPLADE with a sum and two logarithms."""
    return once("sparse routes", "routes", lambda folder: write_routes(folder, prompts={"query": "find: "}))


@pytest.mark.parametrize("route", ["query", "document"])
def test_routes(routes: Path, route: str, tmp_path: Path) -> None:
    path = tmp_path / f"{route}.onnx"
    result = CliRunner().invoke(main, [str(routes), "--route", route, "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "active dimensions" in result.output
    with Engine(path, on_truncate="ignore") as engine:
        encode = engine.encode_query if route == "query" else engine.encode_document
        assert_same(encode(ALL_TEXTS), expected(routes, ALL_TEXTS, route=route))


def test_autoencoder(once: Once, tmp_path: Path) -> None:
    """As trained, 6 numbers of each vector are kept, unless settings or caller say otherwise."""
    source = once("csr", "csr", lambda folder: write_csr(folder, k=6, normalize=True))
    export(source, path := tmp_path / "csr.onnx")
    with Engine(path, on_truncate="ignore") as engine:
        found: Any = engine.encode(ALL_TEXTS)
        assert_same(found, expected(source, ALL_TEXTS))
        assert found.getnnz(axis=1).max() == 6
        assert_same(engine.encode(TEXTS, max_active_dims=9), expected(source, list(TEXTS), max_active_dims=9))
        with pytest.raises(ValueError, match="are no words"):
            engine.decode(found)
    folder = shutil.copytree(source, tmp_path / "csr")
    edit_json(folder / "config_sentence_transformers.json", max_active_dims=4)
    assert read_checkpoint(folder).max_active_dims == 4


@pytest.mark.parametrize("family", ["distilbert", "albert", "xlm-roberta", "modernbert"])
def test_language_models(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer is found in heads of all kinds, also with a sliced vocabulary."""
    monkeypatch.setattr(sparse_reference, "_SLICE", 100)
    folder = write_splade(tmp_path / family, family, strategy="sum" if family == "albert" else "max")
    found = load_reference(read_checkpoint(folder)).encode(ALL_TEXTS)
    np.testing.assert_allclose(found, expected(folder, ALL_TEXTS), rtol=0, atol=1e-5)


def test_memory_is_bounded_by_a_slice(once: Once) -> None:
    """No value of the graph has all words for each token; here slices have 100 words."""
    model = onnx.load(splade_onnx(once))
    shapes = [value.type.tensor_type.shape.dim for value in model.graph.value_info]
    widths = {shape[2].dim_value for shape in shapes if len(shape) == 3}
    vocabulary = read_checkpoint(splade_checkpoint(once)).dim
    assert {100, vocabulary % 100} <= widths
    assert max(widths) == 100
    assert [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim] == [0, vocabulary]


def test_an_older_layout(once: Once, tmp_path: Path) -> None:
    """As sentence-transformers 5.0 saved it."""
    folder = shutil.copytree(splade_checkpoint(once), tmp_path / "old")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    modules[1]["type"] = "sentence_transformers.sparse_encoder.models.SpladePooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    width = read_checkpoint(folder).dim
    edit_json(folder / "1_SpladePooling/config.json", embedding_dimension=..., word_embedding_dimension=width)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.pooling.modes == ("splade_max",)
    assert checkpoint.similarity == "dot"


def test_int8(once: Once) -> None:
    """The head is 8-bit as well, and most active dimensions are the same."""
    path = splade_onnx(once, int8=True)
    products = [node for node in onnx.load(path).graph.node if node.op_type == "MatMulIntegerToFloat"]
    slices = -(-read_checkpoint(splade_checkpoint(once)).dim // 100)
    assert len(products) == 6 + 1 + slices  # of the layer, of the head, and of the vocabulary's slices
    with Engine(path, on_truncate="ignore") as engine:
        parity = engine.manifest.parity
        assert parity["active_overlap"] > 0.9
        assert parity["min_cosine"] > 0.9
        rows: Any = engine.encode(TEXTS)
    found, right = rows.toarray(), expected(splade_checkpoint(once), list(TEXTS))
    cosines = (found * right).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(right, axis=1)
    assert cosines.min() > 0.95


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "mean"}, "'pooling_strategy' must be max or sum"),
        ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "'activation_function' must be relu or"),
        ("1_SpladePooling/config.json", {"embedding_dimension": 7}, "takes vectors of 7, but is given 3"),
        ("1_SpladePooling/config.json", {"temperature": 2}, "unknown key 'temperature'"),
        ("sentence_bert_config.json", {"transformer_task": "feature-extraction"}, "only 'fill-mask' is supported"),
        ("sentence_bert_config.json", {"transformer_task": ...}, "SpladePooling needs 'transformer_task'"),
        ("config_sentence_transformers.json", {"max_active_dims": 0}, "'max_active_dims' must be a positive integer"),
        ("config_sentence_transformers.json", {"model_type": "SentenceTransformer"}, "only a SparseEncoder"),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "'truncate_dim' is not for sparse vectors"),
    ],
)
def test_refused_settings(once: Once, file: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = shutil.copytree(splade_checkpoint(once), tmp_path / "model")
    edit_json(folder / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder)


def test_refused_modules_and_options(once: Once, tmp_path: Path) -> None:
    source = splade_checkpoint(once)
    folder = shutil.copytree(source, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    normalize = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    (folder / "modules.json").write_text(json.dumps([*modules, normalize]))
    with pytest.raises(CheckpointError, match="2_Normalize: comes after 1_SpladePooling"):
        read_checkpoint(folder)
    for options, message in (({"fp16": True}, "no --fp16"), ({"outputs": ("sentence", "tokens")}, "no --outputs")):
        with pytest.raises(ExportError, match=message):
            export(source, tmp_path / "x.onnx", ExportOptions(**options))


def test_a_head_without_weights_is_refused(once: Once, tmp_path: Path) -> None:
    """transformers would fill it with random numbers."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(splade_checkpoint(once), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("cls.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lack 'cls\.predictions\.transform\.dense\.weight'"):
        load_reference(read_checkpoint(folder))


def test_scores_changed_behind_the_last_layer_are_refused() -> None:
    class Scaled(torch.nn.Module):
        """A language model that does something to its scores."""

        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"vocab_size": 9, "model_type": "scaled"})
            self.table, self.decoder = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.decoder

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return type("Output", (), {"logits": self.decoder(self.table(input_ids)) * 3})

    with pytest.raises(CheckpointError, match="changed after its last layer"):
        sparse_reference.LanguageModel(Scaled(), "scaled")
