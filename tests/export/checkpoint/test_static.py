"""StaticEmbedding: a table instead of a transformer, in all the layouts that it is saved in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from sbert_infer import Engine
from sbert_infer.errors import CheckpointError, ExportError, SbertInferWarning
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.reference.encoder import load_reference
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.graphs import assert_close

MakeCheckpoint = Callable[..., Path]

ALL_TEXTS = [*TEXTS, *ODD_TEXTS, "word " * 300]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As sentence-transformers saves it, with a Dense and a Normalize after it."""
    tokenizer = Tokenizer.from_file(str(make_checkpoint() / "tokenizer.json"))
    table = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 24)).astype(np.float32)
    modules = [StaticEmbedding(tokenizer, embedding_weights=table), Dense(24, 16), Normalize()]
    path = tmp_path_factory.mktemp("static") / "tiny-static"
    SentenceTransformer(modules=modules, device="cpu").save(str(path), create_model_card=False)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "static"))


def assert_same(checkpoint: Path, encoder: Any) -> None:
    model = SentenceTransformer(str(checkpoint), device="cpu")
    assert_close(encoder.encode(ALL_TEXTS), model.encode(ALL_TEXTS), 1e-5)  # sums of hundreds of numbers
    assert_close(encoder.encode(["", ""]), model.encode(["", ""]), 1e-6)
    assert_close(encoder.encode(TEXTS, prompt="find: "), model.encode(TEXTS, prompt="find: "), 1e-6)
    assert len(np.unique(encoder.encode(TEXTS).round(2), axis=0)) == len(TEXTS)


def test_vectors(saved: Path, tmp_path: Path) -> None:
    """Texts may have any length: there is no limit to warn about."""
    manifest = export(saved, tmp_path / "static.onnx")
    assert (manifest.architecture, manifest.dim) == ("static", 16)
    with Engine(tmp_path / "static.onnx", on_truncate="error") as engine:
        assert_same(saved, engine)
        assert engine.encode("word " * 3000).shape == (16,)


def test_a_limit_for_the_runtime(saved: Path, tmp_path: Path) -> None:
    export(saved, tmp_path / "static.onnx", ExportOptions(max_length=8))
    with Engine(tmp_path / "static.onnx") as engine, pytest.warns(SbertInferWarning, match="cut to 8 tokens"):
        engine.encode(ALL_TEXTS)


def test_model2vec_layout(copy: Path) -> None:
    """Rows that several tokens share, in FP16, and a weight for each token."""
    rows = load_file(copy / WEIGHTS)["embedding.weight"]
    generator = torch.Generator().manual_seed(0)
    mapping = torch.randint(0, 50, (len(rows),), generator=generator)
    weights = torch.rand(len(rows), generator=generator)
    save_file({"embeddings": rows[:50].half(), "mapping": mapping, "weights": weights}, copy / WEIGHTS)
    assert_same(copy, load_reference(read_checkpoint(copy)))


def test_old_layout(copy: Path) -> None:
    torch.save(load_file(copy / WEIGHTS), copy / "pytorch_model.bin")
    (copy / WEIGHTS).unlink()
    text = (copy / "modules.json").read_text(encoding="utf-8")
    old = text.replace("sentence_transformer.modules.static_embedding.", "models.")
    (copy / "modules.json").write_text(old, encoding="utf-8")
    assert_same(copy, load_reference(read_checkpoint(copy)))


def test_a_limit_of_the_tokenizer_is_kept(copy: Path) -> None:
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.enable_truncation(20)
    tokenizer.save(str(copy / "tokenizer.json"))
    assert_same(copy, load_reference(read_checkpoint(copy)))
    assert read_checkpoint(copy, max_length=8).max_length == 8
    with pytest.raises(CheckpointError, match="max length 21 is more than the 20 tokens"):
        read_checkpoint(copy, max_length=21)


@pytest.mark.parametrize("options", [{"int8": True}, {"fp16": True}])
def test_nothing_to_compute(options: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"static embeddings.*without --{next(iter(options))}"):
        export(saved, tmp_path / "static.onnx", ExportOptions(**options))


def test_problems(copy: Path) -> None:
    def problem() -> str:
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(copy)
        return caught.value.problems[0]

    rows = load_file(copy / WEIGHTS)["embedding.weight"]
    save_file({"embedding.weight": rows[:-1].clone()}, copy / WEIGHTS)
    assert problem().endswith(f"has the token {len(rows) - 1}, but there are vectors for {len(rows) - 1} only")
    save_file({"embeddings": rows, "scales": rows.clone()}, copy / WEIGHTS)
    assert "unknown tensor 'scales'" in problem()
    save_file({"mapping": torch.zeros(3)}, copy / WEIGHTS)
    assert "no table" in problem()
    (copy / "tokenizer.json").write_text("{", encoding="utf-8")
    (copy / WEIGHTS).unlink()
    assert "no weights" in problem()
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        read_checkpoint(copy)


def test_what_may_follow(copy: Path) -> None:
    modules = json.loads((copy / "modules.json").read_text(encoding="utf-8"))
    entry = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 24}', encoding="utf-8")
    (copy / "modules.json").write_text(json.dumps([modules[0], entry]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="1_Pooling: a second step on tokens"):
        read_checkpoint(copy)
