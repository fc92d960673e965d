"""Settings that sentence-transformers saves: those of the transformer and of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sbert_infer.export.checkpoint.hub import shown
from sbert_infer.export.checkpoint.modules import Problems, read_json, unknown_keys

SENTENCE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
ROLE_KEYS = ("query_length", "document_length", "query_expansion")
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
# Old `*_args` and new `*_kwargs` that do not change FP32 vectors, or that we apply ourselves.
_KNOWN_ARGS = {
    "model": {"torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "device_map", "low_cpu_mem_usage"},
    "tokenizer": {"model_max_length", "use_fast", "clean_up_tokenization_spaces"},
    "config": {"output_hidden_states", "use_cache", "attn_implementation", "torch_dtype", "dtype"},
}
# By the transformer's task: the output's name in the module, and in the model.
_OUTPUTS = {
    "feature-extraction": ("token_embeddings", "last_hidden_state"),
    "sequence-classification": ("scores", "logits"),
    "fill-mask": ("token_embeddings", "logits"),
}
_ARGS = {
    "model_args": "model",
    "model_kwargs": "model",
    "tokenizer_args": "tokenizer",
    "processor_kwargs": "tokenizer",
    "config_args": "config",
    "config_kwargs": "config",
}


@dataclass(frozen=True)
class TransformerSettings:
    """The transformer module's own settings (sentence_bert_config.json)."""

    max_length: int | None = None
    do_lower_case: bool = False
    output_hidden_states: bool = False
    by_role: dict[str, Any] = field(default_factory=dict)  # values of `ROLE_KEYS`, of a multi-vector encoder
    task: str | None = None  # if the file names one


def read_transformer_settings(
    folder: Path, root: Path, problems: Problems, *, task: str = "feature-extraction", roles: bool = False
) -> TransformerSettings:
    """The transformer module's settings, from a file of any of its names, or the defaults.

    `task` is the transformer's, `roles` whether queries and documents may be treated differently.
    """
    file = next((folder / name for name in SENTENCE_CONFIGS if (folder / name).is_file()), None)
    if file is None:
        return TransformerSettings()
    name = f"{shown(folder, root)}{file.name}"
    config = read_json(file, name, problems)
    plain = ("max_seq_length", "do_lower_case", "modality_config", "processing_kwargs", "unpad_inputs")
    unset = ("tokenizer_name_or_path", *ROLE_KEYS)
    module_output, model_output = _OUTPUTS[task]
    fixed = {"transformer_task": task, "module_output_name": module_output}
    unknown_keys(config, (*plain, *unset, *fixed, *_ARGS), name, problems)
    problems += [
        f"{name}: '{key}' is not supported yet" for key in unset[: 1 if roles else None] if config.get(key) is not None
    ]
    for key, value in fixed.items():
        if config.get(key, value) != value:
            problems.append(f"{name}: '{key}' is {config[key]!r}; only '{value}' is supported")
    _check_modality(config, name, model_output, problems)
    args = _read_args(config, name, problems)
    length = args["tokenizer"].get("model_max_length", config.get("max_seq_length"))
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        problems.append(f"{name}: 'max_seq_length' must be an integer, not {length!r}")
        length = None
    return TransformerSettings(
        length,
        bool(config.get("do_lower_case")),
        bool(args["config"].get("output_hidden_states")),
        {key: config[key] for key in ROLE_KEYS if config.get(key) is not None},
        config.get("transformer_task"),
    )


def _check_modality(config: dict[str, Any], name: str, output: str, problems: Problems) -> None:
    """Allow only plain text through the model's `forward`, padded and truncated as usual."""
    for modality, params in (config.get("modality_config") or {}).items():
        outputs = params.get("method_output_name") if isinstance(params, dict) else None
        plain = isinstance(params, dict) and params.get("method") == "forward"
        if modality != "text" or not plain or outputs not in (output, [output]):
            problems.append(f"{name}: 'modality_config' has {modality!r}: {params!r}; only plain text is supported")
    usual = {"padding": (True, "longest"), "truncation": (True, "longest_first"), "return_tensors": ("pt",)}
    for group in ("common", "text"):  # the other groups concern other modalities
        for key, value in ((config.get("processing_kwargs") or {}).get(group) or {}).items():
            if value not in usual.get(key, ()):
                problems.append(f"{name}: 'processing_kwargs' sets {group}.{key} = {value!r}, which is not supported")


def _read_args(config: dict[str, Any], name: str, problems: Problems) -> dict[str, dict[str, Any]]:
    """The arguments for model, tokenizer and config: all are harmless, or we apply them."""
    args: dict[str, dict[str, Any]] = {kind: {} for kind in _KNOWN_ARGS}
    for key, kind in _ARGS.items():
        args[kind].update(config.get(key) or {})
        unknown = sorted((config.get(key) or {}).keys() - _KNOWN_ARGS[kind] - {"trust_remote_code"})  # ours to give
        problems += [f"{name}: '{key}' sets '{argument}', which is not supported" for argument in unknown]
    return args


@dataclass(frozen=True)
class ModelSettings:
    """config_sentence_transformers.json. The two prompts exist even if the file lacks them."""

    prompts: dict[str, str] = field(default_factory=lambda: {"query": "", "document": ""})
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    truncate_dim: int | None = None
    max_active_dims: int | None = None  # of a sparse encoder


def read_model_settings(file: Path, problems: Problems, *, sparse: bool = False) -> ModelSettings:
    """The settings of the whole model, or the defaults; `sparse` if its vectors are sparse."""
    config = read_json(file, file.name, problems) if file.is_file() else {}
    known = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "model_type")
    own = ("max_active_dims",) if sparse else ()
    unknown_keys(config, (*known, *own, "__version__", "requirements"), file.name, problems)
    kind = "SparseEncoder" if sparse else "SentenceTransformer"
    if config.get("model_type", kind) != kind:
        problems.append(f"{file.name}: a {config['model_type']} is not supported, with these modules only a {kind}")
    prompts = read_prompts(config, file.name, problems)
    similarity = config.get("similarity_fn_name") or ("dot" if sparse else "cosine")
    if similarity not in _SIMILARITIES:
        problems.append(f"{file.name}: unknown similarity {similarity!r} (known: {', '.join(_SIMILARITIES)})")
    limits = {key: config.get(key) for key in ("truncate_dim", "max_active_dims")}
    for key, limit in limits.items():
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            problems.append(f"{file.name}: '{key}' must be a positive integer, not {limit!r}")
    if sparse and limits["truncate_dim"] is not None:
        problems.append(f"{file.name}: 'truncate_dim' is not for sparse vectors: take it out")
    return ModelSettings(prompts, config.get("default_prompt_name"), similarity, **limits)


def read_prompts(
    config: dict[str, Any], name: str, problems: Problems, usual: Sequence[str] = ("query", "document")
) -> dict[str, str]:
    """The prompts of the whole model's settings, checked; the `usual` ones are empty if not set."""
    saved = config.get("prompts") or {}
    if not isinstance(saved, dict):
        problems.append(f"{name}: 'prompts' must be an object, not {saved!r}")
        saved = {}
    prompts = dict.fromkeys(usual, "") | {key: "" if value is None else value for key, value in saved.items()}
    problems += [
        f"{name}: prompt '{key}' must be a string, not {value!r}"
        for key, value in prompts.items()
        if not isinstance(value, str)
    ]
    default = config.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        problems.append(f"{name}: the default prompt {default!r} is not among the prompts ({', '.join(prompts)})")
    return {key: value for key, value in prompts.items() if isinstance(value, str)}
