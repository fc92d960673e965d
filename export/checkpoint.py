"""A trained sentence-transformers checkpoint: read from a folder or the hub, validated as a whole.

`read_checkpoint` understands the layouts of all versions of sentence-transformers, and lists every problem at once:
whatever it does not understand and could change the vectors is an error, never skipped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from sbert_infer.errors import CheckpointError
from sbert_infer.export.hub import locate, shown, weight_files
from sbert_infer.export.modules import (
    SUPPORTED,
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    PoolingSpec,
    Problems,
    WeightedLayerPoolingSpec,
    check_chain,
    output_dim,
    read_json,
    read_module,
    unknown_keys,
)
from sbert_infer.export.pretrained import length_limit, read_config, read_tokenizer
from sbert_infer.export.settings import (
    SENTENCE_CONFIGS,
    ModelSettings,
    TransformerSettings,
    read_model_settings,
    read_transformer_settings,
)

__all__ = ["Checkpoint", "read_checkpoint", "weights_sha256"]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says, in one spelling. The weights stay on disk."""

    source: str  # what the user typed
    name: str  # folder or repository name, for people
    path: Path
    transformer_path: Path  # folder of config.json and the weights; may be a subfolder
    model_type: str  # e.g. "bert"
    modules: tuple[ModuleSpec, ...]  # behind the transformer, in order
    max_length: int  # in tokens, special ones included
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str
    truncate_dim: int | None
    do_lower_case: bool
    trust_remote_code: bool

    @property
    def dim(self) -> int:
        """Width of the vectors, before `truncate_dim`."""
        return output_dim(self.modules)

    @property
    def pooling(self) -> PoolingSpec:
        """The one pooling module."""
        return next(spec for spec in self.modules if isinstance(spec, PoolingSpec))


@dataclass(frozen=True)
class _Entry:
    """One line of modules.json."""

    kind: str
    path: str

    @property
    def name(self) -> str:
        return self.path or self.kind


def read_checkpoint(
    source: str | Path, *, max_length: int | None = None, trust_remote_code: bool = False
) -> Checkpoint:
    """Read and validate the checkpoint in a local folder or under a hub id.

    `max_length` replaces the checkpoint's own length limit. A configured limit beyond the model's table of positions is
    cut to what the table holds: longer texts could never have worked. Raises one `CheckpointError` with every problem.
    """
    path = locate(str(source), trust_remote_code)
    problems: Problems = []
    entries = _read_modules(path, problems)
    transformer_path = path / next((entry.path for entry in entries if entry.kind == "Transformer"), "")
    config = read_config(transformer_path, path, trust_remote_code, problems)
    own = (path / "modules.json").is_file()  # else sentence-transformers reads none of its own files either
    settings = read_transformer_settings(transformer_path, path, problems) if own else TransformerSettings()
    model = read_model_settings(path / "config_sentence_transformers.json", problems) if own else ModelSettings()
    modules = _read_heads(path, entries, config, settings, problems) if own else _default_modules(config)
    weight_files(transformer_path, shown(transformer_path, path), problems)
    tokenizer = read_tokenizer(transformer_path, path, own, trust_remote_code, problems)
    limit = length_limit(settings.max_length, tokenizer, config, max_length, problems)
    if problems:
        raise CheckpointError(str(source), problems)
    return Checkpoint(
        source=str(source),
        name=path.resolve().name if Path(source).is_dir() else str(source).rpartition("/")[2],
        path=path,
        transformer_path=transformer_path,
        model_type=config.model_type,
        modules=modules,
        max_length=limit,
        prompts=model.prompts,
        default_prompt_name=model.default_prompt_name,
        similarity=model.similarity,
        truncate_dim=model.truncate_dim,
        do_lower_case=settings.do_lower_case,
        trust_remote_code=trust_remote_code,
    )


def _read_modules(path: Path, problems: Problems) -> list[_Entry]:
    """The entries of modules.json; without one, a transformer alone."""
    if not (path / "modules.json").is_file():
        ours = [name for name in (*SENTENCE_CONFIGS, "config_sentence_transformers.json") if (path / name).is_file()]
        problems += [f"modules.json is missing, though {name} is there: is the copy complete?" for name in ours]
        return [_Entry("Transformer", "")]
    entries = []
    for item in read_json(path / "modules.json", "modules.json", problems, list):
        entry = _read_entry(item, problems)
        if entry is not None:
            entries.append(entry)
    kinds = [entry.kind for entry in entries]
    if kinds.count("Transformer") != 1 or kinds[0] != "Transformer":
        problems.append(
            f"modules.json: the first module, and no other, must be a Transformer (found: {', '.join(kinds)})"
        )
    return entries


def _read_entry(item: Any, problems: Problems) -> _Entry | None:
    if not isinstance(item, dict) or not isinstance(item.get("type"), str) or not isinstance(item.get("path"), str):
        problems.append(f"modules.json: every module needs a 'type' and a 'path', not {item!r}")
        return None
    unknown_keys(item, ("idx", "name", "path", "type", "kwargs"), "modules.json", problems)
    windows = PureWindowsPath(item["path"])  # knows both kinds of slash, and drives
    if windows.anchor or ".." in windows.parts:
        problems.append(f"modules.json: the path {item['path']!r} leads out of the checkpoint")
        return None
    package, _, kind = item["type"].rpartition(".")
    if not package.startswith("sentence_transformers.") or kind not in ("Transformer", *SUPPORTED):
        supported = ", ".join(("Transformer", *SUPPORTED))
        problems.append(f"modules.json: module type '{item['type']}' is not supported yet (supported: {supported})")
        return _Entry(kind if kind == "Transformer" else "", item["path"])
    return _Entry(kind, item["path"])


def _read_heads(
    path: Path, entries: list[_Entry], config: Any, settings: TransformerSettings, problems: Problems
) -> tuple[ModuleSpec, ...]:
    """The modules behind the transformer, checked one by one and as a chain."""
    before = len(problems)
    named = [
        (entry.name, read_module(entry.kind, path / entry.path, entry.name, problems))
        for entry in entries
        if entry.kind in SUPPORTED
    ]
    modules = [(name, spec) for name, spec in named if spec is not None]
    if config is None:
        return ()
    weighted = any(isinstance(spec, WeightedLayerPoolingSpec) for _, spec in modules)
    if weighted and not (getattr(config, "output_hidden_states", False) or settings.output_hidden_states):
        # sentence-transformers then skips the module in silence: what was trained is not what it computes.
        problems.append(
            "WeightedLayerPooling needs 'output_hidden_states': true in config.json; without it "
            "sentence-transformers leaves the module out. Set it, or take the module out of modules.json"
        )
    if len(problems) == before:  # a module that could not be read would only break the chain once more
        check_chain(modules, config.hidden_size, config.num_hidden_layers, problems)
    return tuple(spec for _, spec in modules)


def _default_modules(config: Any) -> tuple[ModuleSpec, ...]:
    """What sentence-transformers puts behind a plain transformer: mean, or the last token of a causal one."""
    if config is None:
        return ()
    architecture = (getattr(config, "architectures", None) or [""])[0]
    causal = architecture.endswith("ForCausalLM") and getattr(config, "is_causal", True)
    return (PoolingSpec(config.hidden_size, ("lasttoken",) if causal else ("mean",)),)


def weights_sha256(checkpoint: Checkpoint) -> str:
    """One hash of all weight files that are used: the transformer's, then the modules', in order."""
    files = weight_files(checkpoint.transformer_path, "", [])
    for spec in checkpoint.modules:
        if isinstance(spec, DenseSpec | LayerNormSpec | WeightedLayerPoolingSpec):
            files += weight_files(spec.path, "", [])
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                total.update(chunk)
    return total.hexdigest()
