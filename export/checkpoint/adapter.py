"""Adapters (LoRA, saved by PEFT) that are not merged yet into the weights of their base model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.hub import first_line, locate, shown
from sbert_infer.export.checkpoint.modules import Problems, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Settings that are read here, or that matter only to training. Others must be off.
_KNOWN = {
    *("auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
    *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "alpha_pattern", "revision"),
    *("runtime_config", "target_modules", "task_type", "use_rslora"),
}
# Ways to begin the training that leave the base model's weights as they are.
_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(?:\.weight)?")


@dataclass(frozen=True)
class Adapter:
    """What is to be added to the weights of a base model: scale x B A for each adapted module."""

    file: Path
    base: Path  # folder of the base model
    alpha: float
    alphas: Mapping[str, float]  # the end of a module's name, a regular expression -> its own alpha
    rank_stabilized: bool  # scaled by the root of the rank

    def merge_into(self, model: nn.Module) -> Iterator[str]:
        """Add the adapter to the weights of `model`; yield what is wrong with it."""
        for name, sides in self._sides().items():
            module = _find(model, name)
            if sides.keys() != {"A", "B"} or not isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                yield f"{self.file.name} adapts '{name}', which the base model lacks or which is no linear layer"
                continue
            change = sides["B"] @ sides["A"] * self._scale(name, rank=len(sides["A"]))
            change = change if isinstance(module, nn.Linear) else change.T
            if change.shape != module.weight.shape:
                shapes = f"{list(change.shape)}, the base model's {list(module.weight.shape)}"
                yield f"{self.file.name}: '{name}' has shape {shapes}"
                continue
            with torch.no_grad():
                module.weight += change

    def _scale(self, name: str, rank: int) -> float:
        own = (alpha for end, alpha in self.alphas.items() if re.match(rf"(.*\.)?({end})$", name))
        return next(own, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)

    def _sides(self) -> dict[str, dict[str, Tensor]]:
        """Module -> its matrices A [rank, in] and B [out, rank], in FP32."""
        sides: dict[str, dict[str, Tensor]] = {}
        try:
            weights = load_file(self.file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.file.name} can't be read: {first_line(error)}") from error
        for key, tensor in weights.items():
            if (match := _NAME.fullmatch(key)) is None:
                raise ValueError(f"{self.file.name} holds '{key}', which is not of a LoRA")
            sides.setdefault(match["module"], {})[match["side"]] = tensor.float()
        return sides


def read_adapter(folder: Path, root: Path, trust_remote_code: bool, problems: Problems) -> Adapter | None:
    """Read the adapter in a transformer's folder; None if there is none, or after a problem."""
    name = f"{shown(folder, root)}{CONFIG}"
    if not (folder / CONFIG).is_file():
        return None
    before = len(problems)
    config = read_json(folder / CONFIG, name, problems)
    if config.get("peft_type") != "LORA":
        problems.append(f"{name}: an adapter of type {config.get('peft_type')!r}; of PEFT's only LORA is supported")
        return None
    odd = [key for key, value in config.items() if key not in _KNOWN and value]
    odd += ["bias"] if config.get("bias", "none") != "none" else []
    odd += ["init_lora_weights"] if config.get("init_lora_weights") not in _INITIAL else []
    remedy = "not supported; merge it (merge_and_unload), save that and export the result"
    problems += [f"{name}: '{key}' is {config[key]!r}, which is {remedy}" for key in odd]
    if not (folder / WEIGHTS).is_file():
        problems.append(f"{shown(folder, root) or 'the folder'} has an adapter without weights ({WEIGHTS})")
    source = str(config.get("base_model_name_or_path") or "(not named)")
    revision = config.get("revision")
    try:
        named = source if revision is None or Path(source).is_dir() else f"{source}@{revision}"
        base = locate(named, trust_remote_code)
    except CheckpointError as error:
        problems.append(f"{name}: the base model {source!r}: {error.problems[0]}")
    if len(problems) > before:
        return None
    alphas = dict(config.get("alpha_pattern") or {})
    return Adapter(folder / WEIGHTS, base, config.get("lora_alpha", 8), alphas, bool(config.get("use_rslora")))


def _find(model: nn.Module, name: str) -> nn.Module | None:
    """Find a module by its name, which may have been taken from a model with a head."""
    modules = dict(model.named_modules())
    headless = name.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")
    return modules.get(name, modules.get(headless))
