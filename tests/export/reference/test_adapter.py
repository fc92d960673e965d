"""A LoRA that was saved without its base model is merged, as PEFT would merge it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbert_infer import CheckpointError
from sbert_infer.export.checkpoint.checkpoint import weights_sha256
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.reference.encoder import load_reference
from tests.models.checkpoints import TEXTS

MakeCheckpoint = Callable[..., Path]

QUERY, WORDS = "encoder.layer.1.attention.self.query", "embeddings.word_embeddings"


def write_adapter(base: Path, folder: Path, modules: Mapping[str, tuple[Tensor, Tensor]], **settings: Any) -> Path:
    """Write `base` as sentence-transformers does with an adapter: without its weights."""
    shutil.copytree(base, folder)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 3, "lora_alpha": 6, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in modules.items():
        kind, end = ("embedding_", "") if "embeddings" in name else ("", ".weight")
        tensors |= {f"base_model.model.{name}.lora_{kind}A{end}": a, f"base_model.model.{name}.lora_{kind}B{end}": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def matrices(base: Path, name: str) -> tuple[Tensor, Tensor]:
    """Random A [3, in] and B [out, 3]; the weight of an embedding is [in, out]."""
    shape = load_file(base / "model.safetensors")[f"{name}.weight"].shape
    out, width = reversed(shape) if "embeddings" in name else shape
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(3, width, generator=generator), torch.randn(out, 3, generator=generator)


def encode(folder: Path) -> Any:
    return load_reference(read_checkpoint(folder)).encode(TEXTS)


@pytest.mark.parametrize(
    ("settings", "query", "words"),
    [
        ({}, 2.0, 2.0),
        ({"use_rslora": True}, 6 / 3**0.5, 6 / 3**0.5),
        ({"alpha_pattern": {"self.query": 12}, "init_lora_weights": "gaussian"}, 4.0, 2.0),
    ],
    ids=["plain", "rank-stabilized", "own alpha"],
)
def test_merged(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, settings: dict[str, Any], query: float, words: float
) -> None:
    base = make_checkpoint("bert")
    modules = {name: matrices(base, name) for name in (QUERY, WORDS)}
    adapted = write_adapter(base, tmp_path / "adapted", modules, **settings)
    by_hand = Path(shutil.copytree(base, tmp_path / "by-hand"))
    weights = load_file(base / "model.safetensors")
    (a, b), (words_a, words_b) = modules.values()
    weights[f"{QUERY}.weight"] += query * b @ a
    weights[f"{WORDS}.weight"] += words * (words_b @ words_a).T
    save_file(weights, by_hand / "model.safetensors", {"format": "pt"})
    np.testing.assert_allclose(encode(adapted), encode(by_hand), rtol=0, atol=1e-6)
    assert np.abs(encode(adapted) - encode(base)).max() > 1e-3
    hashes = {weights_sha256(read_checkpoint(folder)) for folder in (base, adapted, by_hand)}
    assert len(hashes) == 3


def test_names_of_a_model_with_a_head(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    base = make_checkpoint("bert")
    modules = {QUERY: matrices(base, QUERY)}
    plain = write_adapter(base, tmp_path / "plain", modules)
    headed = write_adapter(base, tmp_path / "headed", {f"bert.{QUERY}": modules[QUERY]})
    np.testing.assert_array_equal(encode(plain), encode(headed))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"peft_type": "IA3"}, "an adapter of type 'IA3'"),
        ({"use_dora": True}, "'use_dora' is True, which is not supported"),
        ({"some_new_option": 3}, "'some_new_option' is 3"),
        ({"bias": "all"}, "'bias' is 'all'"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' is 'pissa'"),
        ({"base_model_name_or_path": "./not/there"}, "the base model './not/there': neither a folder here nor"),
    ],
)
def test_what_is_not_understood_is_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    base = make_checkpoint("bert")
    folder = write_adapter(base, tmp_path / "adapted", {QUERY: matrices(base, QUERY)}, **settings)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("encoder.layer.9.attention.self.query", "which the base model lacks"),
        ("embeddings.LayerNorm", "no linear layer"),
        ("encoder.layer.0.intermediate.dense", "the base model's"),
    ],
)
def test_an_adapter_of_another_model(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, problem: str) -> None:
    base = make_checkpoint("bert")
    folder = write_adapter(base, tmp_path / "adapted", {name: matrices(base, QUERY)})
    with pytest.raises(CheckpointError, match=problem):
        encode(folder)


def test_without_weights(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    base = make_checkpoint("bert")
    folder = write_adapter(base, tmp_path / "adapted", {QUERY: matrices(base, QUERY)})
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter without weights \(adapter_model\.safetensors\)"):
        read_checkpoint(folder)
