"""Recognise a trained cross-encoder, read it from a folder or the hub, and validate all of it.

sentence-transformers has saved its `CrossEncoder` in three layouts: the model alone, with the
activation function as `sbert_ce_default_activation_function` in config.json (before 4), as
`sentence_transformers.activation_fn` there (4 and 5), or beside modules.json in
config_sentence_transformers.json (since 5.4). Without any of these it is a plain model of
transformers for sequence classification, with the activation that `CrossEncoder` takes by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.checkpoint.hub import locate, weight_files
from sbert_infer.export.checkpoint.modules import Problems, peek_json, read_json, unknown_keys
from sbert_infer.export.checkpoint.modules_json import read_entries
from sbert_infer.export.checkpoint.settings import TransformerSettings, read_prompts, read_transformer_settings
from sbert_infer.export.checkpoint.transformer import length_limit, read_config, read_tokenizer

_SUFFIX = "ForSequenceClassification"
_SETTINGS = "config_sentence_transformers.json"
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}  # by the class's name in torch.nn
_REFUSED = {
    "LogitScore": "it reads a score from the words of a language model, and an artifact has none",
    "Dense": "only a model that is for sequence classification by itself is supported",
}


@dataclass(frozen=True, kw_only=True)
class CrossEncoderCheckpoint(Checkpoint):
    """The content of a cross-encoder's checkpoint, the same for all layouts. It has no modules."""

    activation: str  # identity or sigmoid
    labels: tuple[str, ...]

    @property
    def dim(self) -> int:
        """Number of scores."""
        return len(self.labels)


def is_cross_encoder(path: Path) -> bool:
    """Whether the folder `path` holds a readable cross-encoder."""
    if (path / "modules.json").is_file():
        return bool(peek_json(path / _SETTINGS).get("model_type") == "CrossEncoder")
    architectures = peek_json(path / "config.json").get("architectures")
    return isinstance(architectures, list) and any(str(name).endswith(_SUFFIX) for name in architectures)


def read_cross_encoder(
    source: str | Path, *, max_length: int | None = None, trust_remote_code: bool = False
) -> CrossEncoderCheckpoint:
    """Read and validate the cross-encoder in a local folder or under a hub id.

    `max_length` replaces the checkpoint's own length limit, which is for both texts of a pair
    together. Raises one `CheckpointError` with every problem.
    """
    path = locate(str(source), trust_remote_code)
    problems: Problems = []
    own = (path / "modules.json").is_file()
    folder = path / (_module_folder(path, problems) if own else "")
    config = read_config(folder, path, trust_remote_code, problems)
    transformer = _read_transformer_settings(folder, path, own, problems)
    settings = _read_settings(path / _SETTINGS, problems) if own else {}
    prompts = read_prompts(settings, _SETTINGS, problems, usual=())
    weight_files(folder, "", problems)
    tokenizer = read_tokenizer(folder, path, own, trust_remote_code, problems)
    limit = length_limit(transformer.max_length, tokenizer, config, max_length, problems)
    _check_pairs(tokenizer, limit, problems)
    activation = _activation(settings, config, problems)
    _check_architecture(config, problems)
    if problems:
        raise CheckpointError(str(source), problems)
    return CrossEncoderCheckpoint(
        source=str(source),
        path=path,
        transformer_path=folder,
        model_type=config.model_type,
        max_length=limit,
        prompts=prompts,
        default_prompt_name=settings.get("default_prompt_name"),
        do_lower_case=transformer.do_lower_case,
        trust_remote_code=trust_remote_code,
        activation=activation,
        labels=tuple(str(config.id2label[index]) for index in range(config.num_labels)),
    )


def _module_folder(path: Path, problems: Problems) -> str:
    """The folder of the only module, the transformer."""
    items = read_json(path / "modules.json", "modules.json", problems, list)
    kinds = [str(item.get("type")).rpartition(".")[2] if isinstance(item, dict) else "?" for item in items]
    for kind in kinds[1:]:
        why = _REFUSED.get(kind, "a cross-encoder may have a Transformer only")
        problems.append(f"modules.json: the module {kind} of a cross-encoder is not supported ({why})")
    if problems:
        return ""
    entries = read_entries(path, None, problems)
    return entries[0].path if entries else ""


def _read_transformer_settings(folder: Path, root: Path, own: bool, problems: Problems) -> TransformerSettings:
    """The transformer's settings; defaults without modules.json, and after a refused module."""
    if not own or problems:
        return TransformerSettings()
    return read_transformer_settings(folder, root, problems, task="sequence-classification")


def _read_settings(file: Path, problems: Problems) -> dict[str, Any]:
    config: dict[str, Any] = read_json(file, file.name, problems)
    known = ("prompts", "default_prompt_name", "model_type", "activation_fn", "keep_in_fp32_modules")
    unknown_keys(config, (*known, "__version__", "requirements"), file.name, problems)
    return config


def _activation(settings: dict[str, Any], config: Any, problems: Problems) -> str:
    """The activation, by its name alone: nothing that a checkpoint names is imported."""
    saved = getattr(config, "sentence_transformers", None)
    path = settings.get("activation_fn")
    if path is None and isinstance(saved, dict):
        path = saved.get("activation_fn")
    path = path or getattr(config, "sbert_ce_default_activation_function", None)
    if path is None:
        return "sigmoid" if getattr(config, "num_labels", 0) == 1 else "identity"
    package, _, name = str(path).rpartition(".")
    if name not in _ACTIVATIONS or not f"{package}.".startswith("torch.nn."):
        known = " and ".join(f"torch.nn.{name}" for name in _ACTIVATIONS)
        problems.append(f"the activation function '{path}' is not supported, only {known}")
    return _ACTIVATIONS.get(name, "identity")


def _check_pairs(tokenizer: Any, limit: int, problems: Problems) -> None:
    if tokenizer is None:
        return
    needed = tokenizer.num_special_tokens_to_add(pair=True) + 2
    if limit < needed:
        problems.append(f"max length {limit} is too small: a pair of texts needs at least {needed} tokens")
    if odd := set(tokenizer("a", "b").get("token_type_ids", ())) - {0, 1}:
        problems.append(f"{type(tokenizer).__name__} gives the token type {max(odd)}; only 0 and 1 are supported")


def _check_architecture(config: Any, problems: Problems) -> None:
    if config is None:
        return
    names = getattr(config, "architectures", None) or ["none"]
    if not any(name.endswith(_SUFFIX) for name in names):
        problems.append(f"config.json: the architecture {names[0]} is not one for sequence classification")
    if config.is_encoder_decoder:
        problems.append(f"config.json: a {config.model_type} is an encoder-decoder: not supported as a cross-encoder")
