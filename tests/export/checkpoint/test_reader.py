"""Checkpoints are read in every layout, with the right length limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from sbert_infer.export.checkpoint.checkpoint import Checkpoint, weights_sha256
from sbert_infer.export.checkpoint.modules import (
    DenseSpec,
    LayerNormSpec,
    NormalizeSpec,
    PoolingSpec,
    WeightedLayerPoolingSpec,
)
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.checkpoint.transformer import load_tokenizer
from tests.export.checkpoint.problems import MODEL, POOLING, SETTINGS, edit_modules, the_problem
from tests.models.checkpoints import MAX_LENGTH, edit_json

MakeCheckpoint = Callable[..., Path]


def test_minilm(minilm_path: Path) -> None:
    checkpoint = read_checkpoint(minilm_path)
    assert checkpoint == Checkpoint(
        source=str(minilm_path),
        path=minilm_path,
        transformer_path=minilm_path,
        model_type="bert",
        modules=(PoolingSpec(384, ("mean",)), NormalizeSpec()),
        max_length=256,
        prompts={"query": "", "document": ""},
        default_prompt_name=None,
        similarity="cosine",
        truncate_dim=None,
        do_lower_case=False,
        trust_remote_code=False,
        max_positions=512,
    )
    assert checkpoint.dim == 384
    assert checkpoint.name == minilm_path.name


@pytest.mark.parametrize("layout", ["new", "old"])
def test_every_module(layout: str, make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(
        pooling=("cls", "mean_sqrt_len_tokens"),
        include_prompt=False,
        layer_pooling=1,
        dense=[{"out_features": 16, "bias": False, "activation_function": "GELU", "use_residual": True}],
        layer_norm=True,
        layout=layout,
    )
    checkpoint = read_checkpoint(path)
    assert checkpoint.modules == (
        WeightedLayerPoolingSpec(path / "1_WeightedLayerPooling", 32, 1, 2),
        PoolingSpec(32, ("cls", "mean_sqrt_len"), include_prompt=False),
        DenseSpec(path / "3_Dense", 64, 16, bias=False, activation="GELU", residual=True),
        LayerNormSpec(path / "4_LayerNorm", 16),
        NormalizeSpec(),
    )
    assert (checkpoint.dim, checkpoint.pooling.modes) == (16, ("cls", "mean_sqrt_len"))


def test_settings(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(
        prompts={"query": "q: ", "task": "t: "}, default_prompt_name="task", similarity="dot", truncate_dim=8
    )
    checkpoint = read_checkpoint(path)
    assert checkpoint.prompts == SentenceTransformer(str(path), device="cpu").prompts
    assert checkpoint.prompts == {"query": "q: ", "document": "", "task": "t: "}
    assert (checkpoint.default_prompt_name, checkpoint.similarity, checkpoint.truncate_dim) == ("task", "dot", 8)
    assert checkpoint.dim == 32


def test_old_names_of_the_settings_file(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint("xlm-roberta", layout="old", max_length=32)
    (path / SETTINGS).rename(path / "sentence_xlm-roberta_config.json")
    edit_json(path / "sentence_xlm-roberta_config.json", max_seq_length=20, do_lower_case=True)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.max_length, checkpoint.do_lower_case) == (20, True)


def test_dropout_is_the_identity(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    (path / "3_Dropout").mkdir()
    edit_json(path / "3_Dropout" / "config.json", dropout=0.2)
    dropout = {"idx": 3, "name": "3", "path": "3_Dropout", "type": "sentence_transformers.models.Dropout"}
    edit_modules(path, lambda entries: entries.append(dropout))
    assert read_checkpoint(path).modules == (PoolingSpec(32, ("mean",)), NormalizeSpec())


@pytest.mark.parametrize(
    ("config", "modes"),
    [
        ({}, ("mean",)),
        ({"pooling_mode_mean_tokens": False}, ("mean",)),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, ("cls", "lasttoken")),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, ("mean_sqrt_len",)),
        ({"pooling_mode": ["mean", "cls"], "pooling_mode_max_tokens": True}, ("mean", "cls")),
    ],
    ids=str,
)
def test_pooling_spellings(config: dict[str, Any], modes: tuple[str, ...], copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    (path / POOLING).write_text(json.dumps({"word_embedding_dimension": 32, **config}), encoding="utf-8")
    assert read_checkpoint(path).pooling.modes == modes


@pytest.mark.parametrize(
    ("architecture", "is_causal", "mode"),
    [("BertModel", None, "mean"), ("BertForCausalLM", None, "lasttoken"), ("BertForCausalLM", False, "mean")],
)
def test_plain_transformer(
    architecture: str, is_causal: bool | None, mode: str, copy_checkpoint: MakeCheckpoint
) -> None:
    path = copy_checkpoint()
    for name in ("modules.json", SETTINGS, MODEL):
        (path / name).unlink()
    edit_json(path / "config.json", architectures=[architecture], **({} if is_causal is None else {"is_causal": False}))
    assert read_checkpoint(path).modules == (PoolingSpec(32, (mode,)),)


def test_known_arguments(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(layout="old")
    edit_json(
        path / SETTINGS,
        model_args={"torch_dtype": "float16", "add_pooling_layer": False, "trust_remote_code": True},
        tokenizer_args={"model_max_length": 30},
        config_args={"use_cache": False},
    )
    checkpoint = read_checkpoint(path)
    assert (checkpoint.max_length, checkpoint.trust_remote_code) == (30, False)


def test_tokenizer_drops_baked_in_settings(minilm_path: Path) -> None:
    tokenizer = load_tokenizer(read_checkpoint(minilm_path))
    assert tokenizer.is_fast
    assert tokenizer.model_max_length == 256
    assert tokenizer.backend_tokenizer.truncation is None
    assert tokenizer.backend_tokenizer.padding is None


def test_transformers_stays_as_it_was(minilm_path: Path) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    read_checkpoint(minilm_path)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_weights_sha256(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(dense=[{"out_features": 16}])
    hashes = {weights_sha256(read_checkpoint(path))}
    assert hashes == {weights_sha256(read_checkpoint(path))}
    for file in (path / "model.safetensors", path / "2_Dense" / "model.safetensors"):
        save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
        hashes.add(weights_sha256(read_checkpoint(path)))
    edit_json(path / MODEL, prompts={"query": "q: "})
    hashes.add(weights_sha256(read_checkpoint(path)))
    assert len(hashes) == 3


# -------------------------------------------------------------------------------------------------
# length limit


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "albert", "distilbert"])
def test_limit_never_exceeds_the_position_table(family: str, copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint(family, layout="old")
    edit_json(path / SETTINGS, max_seq_length=1000)
    checkpoint = read_checkpoint(path)
    assert checkpoint.max_length == MAX_LENGTH
    model = SentenceTransformer(str(path), device="cpu")
    model.max_seq_length = MAX_LENGTH
    model.encode("word " * 200)  # the table holds that many
    model.max_seq_length = MAX_LENGTH + 1
    with pytest.raises((IndexError, RuntimeError)):  # and not one more
        model.encode("word " * 200)


def test_limit_of_the_tokenizer(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint()
    edit_json(path / "tokenizer_config.json", model_max_length=40)
    assert read_checkpoint(path).max_length == 40
    edit_json(path / "tokenizer_config.json", model_max_length=10**30)
    assert read_checkpoint(path).max_length == MAX_LENGTH


def test_limit_of_the_user(copy_checkpoint: MakeCheckpoint) -> None:
    path = copy_checkpoint("roberta", layout="old")
    edit_json(path / SETTINGS, max_seq_length=20)
    assert read_checkpoint(path, max_length=64).max_length == 64
    assert the_problem(path, max_length=65) == "max length 65 is more than the 64 tokens that the model allows"
    assert "max length 2 is too small" in the_problem(path, max_length=2)
