"""Small random checkpoints of every family, saved by sentence-transformers in its layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, WeightedLayerPooling
from torch import nn

from tests.models.families import FAMILIES, LAYERS, MAX_LENGTH, TEXTS, WIDTH, randomize, write_transformer

__all__ = ["FAMILIES", "LAYERS", "MAX_LENGTH", "ODD_TEXTS", "TEXTS", "WIDTH", "edit_json", "write_checkpoint"]

# What breaks tokenizers, padding and length limits; one text is far over the limit.
ODD_TEXTS = (
    *(
        "",
        " ",
        "a",
        "  two  spaces ",
        "UPPER lower MiXeD",
        "line\nbreak\ttab",
        "naïve café",
        "漢字とかな",
        "🙂🚀",
        "[SEP] </s>",
    ),
    " ".join(TEXTS),
)


def write_checkpoint(
    folder: Path,
    family: str = "bert",
    *,
    pooling: Sequence[str] = ("mean",),
    include_prompt: bool = True,
    layer_pooling: int | None = None,
    dense: Sequence[Mapping[str, Any]] = (),
    layer_norm: bool = False,
    normalize: bool = True,
    layout: str = "new",
    lower_case: bool = False,
    max_length: int = MAX_LENGTH,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    similarity: str | None = None,
    truncate_dim: int | None = None,
    padding_side: str = "right",
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint into `folder` and return `folder`.

    `pooling` and `dense` use the names of sentence-transformers: each of `dense` holds the
    arguments of one Dense without `in_features`, and with `activation_function` as a name in
    `torch.nn`. `layer_pooling` is the first layer of a WeightedLayerPooling. `lower_case` is
    `do_lower_case`; `config` overrides values of the transformer's config.json.
    """
    write_transformer(
        folder,
        family,
        max_length=max_length,
        padding_side=padding_side,
        hidden_states=layer_pooling is not None,
        seed=seed,
        config=config,
    )
    modules: list[nn.Module] = []
    if layer_pooling is not None:
        modules.append(WeightedLayerPooling(WIDTH, num_hidden_layers=LAYERS, layer_start=layer_pooling))
    modules.append(Pooling(WIDTH, pooling_mode=list(pooling), include_prompt=include_prompt))
    modules += _dense(dense, WIDTH * len(pooling))
    width = dense[-1]["out_features"] if dense else WIDTH * len(pooling)
    modules += [LayerNorm(width)] * layer_norm + [Normalize()] * normalize
    for module in modules:
        randomize(module, seed + 1)
    model = SentenceTransformer(
        modules=[Transformer(str(folder)), *modules],
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        similarity_fn_name=similarity,
        truncate_dim=truncate_dim,
        device="cpu",
    )
    shutil.rmtree(folder)
    model.save(str(folder), create_model_card=False)
    if layout == "old":
        to_old_layout(folder, max_length)
    if lower_case:
        edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    return folder


def _dense(layers: Sequence[Mapping[str, Any]], width: int) -> Iterator[nn.Module]:
    """The Dense modules, the first of which takes vectors of `width`."""
    for arguments in layers:
        activation = getattr(nn, arguments.get("activation_function", "Tanh"))()
        yield Dense(width, **{**arguments, "activation_function": activation})
        width = arguments["out_features"]


def to_old_layout(folder: Path, max_length: int) -> None:
    """Rewrite a checkpoint in the layout of sentence-transformers 2: old names, `.bin` weights."""
    entries = _json(folder / "modules.json")
    for entry in entries:
        entry["type"] = f"sentence_transformers.models.{entry['type'].rpartition('.')[2]}"
        config = folder / entry["path"] / "config.json"
        if entry["type"].endswith(("Pooling", "Normalize")):
            (_old_pooling if entry["type"].endswith("Pooling") else Path.unlink)(config)
    _write(folder / "modules.json", entries)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    saved = _json(folder / "config_sentence_transformers.json")
    _write(folder / "config_sentence_transformers.json", {k: v for k, v in saved.items() if k != "model_type"})
    for file in folder.rglob("model.safetensors"):
        torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        file.unlink()


def _old_pooling(file: Path) -> None:
    config = _json(file)
    config["word_embedding_dimension"] = config.pop("embedding_dimension")
    if "pooling_mode" in config:
        named = config.pop("pooling_mode")
        modes = [named] if isinstance(named, str) else named
        old = {"cls": "cls_token", "lasttoken": "lasttoken", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens"}
        for mode in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"):
            config[f"pooling_mode_{old.get(mode, f'{mode}_tokens')}"] = mode in modes
    _write(file, config)


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of `...` removes the key."""
    config = (_json(file) if file.is_file() else {}) | changes
    _write(file, {key: value for key, value in config.items() if value is not ...})


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
