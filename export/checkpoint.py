"""A trained sentence-transformers checkpoint: read from a folder or the hub, validated as a whole.

`read_checkpoint` understands the layouts of all versions of sentence-transformers, and lists every problem at once:
whatever it does not understand and could change the vectors is an error, never skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import transformers
from tokenizers import normalizers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from sbert_infer.errors import CheckpointError
from sbert_infer.export.modules import (
    SUPPORTED,
    DenseSpec,
    LayerNormSpec,
    ModuleSpec,
    NormalizeSpec,
    PoolingSpec,
    Problems,
    WeightedLayerPoolingSpec,
    check_chain,
    output_dim,
    read_json,
    read_module,
    unknown_keys,
)

__all__ = [
    "Checkpoint",
    "DenseSpec",
    "LayerNormSpec",
    "ModuleSpec",
    "NormalizeSpec",
    "PoolingSpec",
    "WeightedLayerPoolingSpec",
    "load_tokenizer",
    "quiet_transformers",
    "read_checkpoint",
    "weights_sha256",
]

MIN_LENGTH = 3  # a leading and a trailing special token, and one of the text
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_SENTENCE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spiece.model", "spm.model"),
)
# Of these encoder-decoder models the encoder is taken, as sentence-transformers does.
ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
# Models with a table of learned positions: a text longer than it crashes, so it bounds every length limit.
_TABLE = {"albert", "bert", "convbert", "distilbert", "electra", "ernie", "mobilebert", "squeezebert"}
# The same, but the positions of real tokens start behind the padding token's id.
_TABLE_AFTER_PAD = {
    *("camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}
# Old `*_args` and new `*_kwargs` that leave FP32 vectors as they are, or that we apply ourselves.
_KNOWN_ARGS = {
    "model": {"torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "device_map", "low_cpu_mem_usage"},
    "tokenizer": {"model_max_length", "use_fast", "clean_up_tokenization_spaces"},
    "config": {"output_hidden_states", "use_cache", "attn_implementation", "torch_dtype", "dtype"},
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


@dataclass(frozen=True)
class _Settings:
    """The transformer module's own settings (sentence_bert_config.json)."""

    max_length: int | None = None
    do_lower_case: bool = False
    output_hidden_states: bool = False


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
    config = _read_config(transformer_path, path, trust_remote_code, problems)
    own = (path / "modules.json").is_file()  # else sentence-transformers reads none of its own files either
    settings = _read_settings(transformer_path, path, problems) if own else _Settings()
    model = _read_model_config(path / "config_sentence_transformers.json", problems) if own else _ModelConfig()
    modules = _read_heads(path, entries, config, settings, problems) if own else _default_modules(config)
    weight_files(transformer_path, _shown(transformer_path, path), problems)
    tokenizer = _read_tokenizer(transformer_path, path, own, trust_remote_code, problems)
    limit = _length_limit(settings.max_length, tokenizer, config, max_length, problems)
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


# ----------------------------------------------------------------------------------------------- where it is


def locate(source: str, trust_remote_code: bool = False) -> Path:
    """The local folder of `source`, downloaded if it is a hub id."""
    if Path(source).is_dir():
        return Path(source)
    import huggingface_hub

    try:
        listed = huggingface_hub.HfApi().model_info(source, timeout=10).siblings or []
        files = needed_files((file.rfilename for file in listed), trust_remote_code)
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=files))
    except Exception as error:  # the errors of the hub and of its HTTP library share no base class
        try:  # without a network, what an earlier download left is as good
            return Path(huggingface_hub.snapshot_download(source, local_files_only=True))
        except Exception:
            problem = f"neither a folder here nor a model that could be fetched from the hub ({_first_line(error)})"
            raise CheckpointError(source, [problem]) from error


def needed_files(files: Iterable[str], trust_remote_code: bool = False) -> list[str]:
    """Of a repository's files those that a checkpoint is read from: `.bin` only where there is no safetensors."""
    paths = [PurePosixPath(file) for file in files]
    safe = {path.parent for path in paths if path.match("model*.safetensors")}
    patterns = ["*.json", "*.txt", "*.model", "model*.safetensors", *(["*.py"] if trust_remote_code else [])]
    return [
        str(path)
        for path in paths
        if path.parts[0] not in ("onnx", "openvino")
        and (any(map(path.match, patterns)) or (path.match("pytorch_model*.bin") and path.parent not in safe))
    ]


def weight_files(folder: Path, name: str, problems: Problems) -> list[Path]:
    """The weight files that are used: safetensors before `.bin`, one file before its shards."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (folder / stem).is_file():
            return [folder / stem]
        index = folder / f"{stem}.index.json"
        if index.is_file():
            weight_map = read_json(index, f"{name}{index.name}", problems).get("weight_map", {})
            shards = [folder / shard for shard in sorted(set(weight_map.values()))]
            problems += [
                f"{name}{shard.name} is missing, though {index.name} lists it"
                for shard in shards
                if not shard.is_file()
            ]
            return shards
    problems.append(f"{name or 'the folder'} has no weights (model.safetensors or pytorch_model.bin)")
    return []


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


# ---------------------------------------------------------------------------------------------- the JSON files


def _shown(folder: Path, root: Path) -> str:
    """Prefix of a file's name in messages: relative to the checkpoint, empty at its top."""
    return "" if folder == root else f"{folder.relative_to(root).as_posix()}/"


def _read_modules(path: Path, problems: Problems) -> list[_Entry]:
    """The entries of modules.json; without one, a transformer alone."""
    if not (path / "modules.json").is_file():
        ours = [name for name in (*_SENTENCE_CONFIGS, "config_sentence_transformers.json") if (path / name).is_file()]
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


def _read_config(folder: Path, root: Path, trust_remote_code: bool, problems: Problems) -> Any:
    """The transformer's config as transformers sees it; None after a problem."""
    name = f"{_shown(folder, root)}config.json"
    if (folder / "adapter_config.json").is_file():
        problems.append(
            f"{_shown(folder, root)}adapter_config.json: adapters (PEFT) are not supported; "
            "merge it into its base model (merge_and_unload), save that and convert the result"
        )
        return None
    before = len(problems)
    raw = read_json(folder / "config.json", name, problems)
    if len(problems) > before:
        return None
    if raw.get("model_type") not in CONFIG_MAPPING_NAMES and not (raw.get("auto_map") and trust_remote_code):
        remedy = "it needs code of its own: --trust-remote-code" if raw.get("auto_map") else "is a newer one needed?"
        version = f"transformers {transformers.__version__}"
        problems.append(f"{name}: {version} does not know the model type {raw.get('model_type')!r}; {remedy}")
        return None
    try:
        with quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the file's values make of a config class
        problems.append(f"{name}: transformers can't read it: {_first_line(error)}")
        return None
    if config.is_encoder_decoder and config.model_type not in ENCODERS:
        problems.append(f"{name}: encoder-decoder models are not supported, except {', '.join(ENCODERS)}")
    if getattr(config, "hidden_size", None) is None:
        problems.append(f"{name}: a {config.model_type} has no single 'hidden_size'; only text encoders are supported")
        return None
    return config


def _read_settings(folder: Path, root: Path, problems: Problems) -> _Settings:
    """The transformer module's settings, whichever of its file names is there; none is fine."""
    file = next((folder / name for name in _SENTENCE_CONFIGS if (folder / name).is_file()), None)
    if file is None:
        return _Settings()
    name = f"{_shown(folder, root)}{file.name}"
    config = read_json(file, name, problems)
    plain = ("max_seq_length", "do_lower_case", "modality_config", "processing_kwargs", "unpad_inputs")
    unset = ("tokenizer_name_or_path", "query_length", "document_length", "query_expansion")
    fixed = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    unknown_keys(config, (*plain, *unset, *fixed, *_ARGS), name, problems)
    problems += [f"{name}: '{key}' is not supported yet" for key in unset if config.get(key) is not None]
    for key, value in fixed.items():
        if config.get(key, value) != value:
            problems.append(f"{name}: '{key}' is {config[key]!r}; only '{value}' is supported")
    _check_modality(config, name, problems)
    args = _read_args(config, name, problems)
    length = args["tokenizer"].get("model_max_length", config.get("max_seq_length"))
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        problems.append(f"{name}: 'max_seq_length' must be an integer, not {length!r}")
        length = None
    return _Settings(length, bool(config.get("do_lower_case")), bool(args["config"].get("output_hidden_states")))


def _check_modality(config: dict[str, Any], name: str, problems: Problems) -> None:
    """Only plain text through the model's `forward`, padded and truncated as usual."""
    for modality, params in (config.get("modality_config") or {}).items():
        outputs = params.get("method_output_name") if isinstance(params, dict) else None
        plain = isinstance(params, dict) and params.get("method") == "forward"
        if modality != "text" or not plain or outputs not in ("last_hidden_state", ["last_hidden_state"]):
            problems.append(f"{name}: 'modality_config' has {modality!r}: {params!r}; only plain text is supported")
    usual = {"padding": (True, "longest"), "truncation": (True, "longest_first"), "return_tensors": ("pt",)}
    for group in ("common", "text"):  # the other groups concern other modalities
        for key, value in ((config.get("processing_kwargs") or {}).get(group) or {}).items():
            if value not in usual.get(key, ()):
                problems.append(f"{name}: 'processing_kwargs' sets {group}.{key} = {value!r}, which is not supported")


def _read_args(config: dict[str, Any], name: str, problems: Problems) -> dict[str, dict[str, Any]]:
    """The arguments for model, tokenizer and config, each known to be harmless or applied by us."""
    args: dict[str, dict[str, Any]] = {kind: {} for kind in _KNOWN_ARGS}
    for key, kind in _ARGS.items():
        args[kind].update(config.get(key) or {})
        unknown = sorted((config.get(key) or {}).keys() - _KNOWN_ARGS[kind] - {"trust_remote_code"})  # ours to give
        problems += [f"{name}: '{key}' sets '{argument}', which is not supported" for argument in unknown]
    return args


@dataclass(frozen=True)
class _ModelConfig:
    """config_sentence_transformers.json; the two prompts are there even if the file does not name them."""

    prompts: dict[str, str] = field(default_factory=lambda: {"query": "", "document": ""})
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    truncate_dim: int | None = None


def _read_model_config(file: Path, problems: Problems) -> _ModelConfig:
    config = read_json(file, file.name, problems) if file.is_file() else {}
    known = ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "model_type")
    unknown_keys(config, (*known, "__version__", "requirements"), file.name, problems)
    if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        problems.append(f"{file.name}: a {config['model_type']} is not supported yet, only a SentenceTransformer")
    prompts = _read_prompts(config, file.name, problems)
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        problems.append(f"{file.name}: unknown similarity {similarity!r} (known: {', '.join(_SIMILARITIES)})")
    truncate_dim = config.get("truncate_dim")
    if truncate_dim is not None and (not isinstance(truncate_dim, int) or truncate_dim < 1):
        problems.append(f"{file.name}: 'truncate_dim' must be a positive integer, not {truncate_dim!r}")
    return _ModelConfig(prompts, config.get("default_prompt_name"), similarity, truncate_dim)


def _read_prompts(config: dict[str, Any], name: str, problems: Problems) -> dict[str, str]:
    saved = config.get("prompts") or {}
    if not isinstance(saved, dict):
        problems.append(f"{name}: 'prompts' must be an object, not {saved!r}")
        saved = {}
    prompts = _ModelConfig().prompts | {key: "" if value is None else value for key, value in saved.items()}
    problems += [
        f"{name}: prompt '{key}' must be a string, not {value!r}"
        for key, value in prompts.items()
        if not isinstance(value, str)
    ]
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        problems.append(f"{name}: the default prompt {default!r} is not among the prompts ({', '.join(prompts)})")
    return prompts


# ------------------------------------------------------------------------------- modules, tokenizer, length limit


def _read_heads(
    path: Path, entries: list[_Entry], config: Any, settings: _Settings, problems: Problems
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


def _read_tokenizer(folder: Path, root: Path, own: bool, trust_remote_code: bool, problems: Problems) -> Any:
    """The tokenizer, checked; None after a problem."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        problems.append(f"{_shown(folder, root) or 'the folder'} has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
        return None
    try:
        tokenizer = _auto_tokenizer(folder, trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exceptions
        problems.append(f"the tokenizer can't be loaded: {_first_line(error)}")
        return None
    if not tokenizer.is_fast:
        problems.append(f"{type(tokenizer).__name__} is not a fast tokenizer, so it has no tokenizer.json")
    if tokenizer.pad_token_id is None:
        problems.append("the tokenizer has no padding token, so texts can't be batched; set pad_token")
    elif any(tokenizer("a text").get("token_type_ids", [])):
        problems.append(f"{type(tokenizer).__name__} gives token types other than 0, which is not supported")
    if not own and getattr(tokenizer, "chat_template", None):
        problems.append("the tokenizer has a chat template, which sentence-transformers would apply: not supported")
    return tokenizer


def _auto_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    with quiet_transformers():
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's (fast) tokenizer with its true length limit; what tokenizer.json says of it is dropped."""
    tokenizer = _auto_tokenizer(checkpoint.transformer_path, checkpoint.trust_remote_code)
    tokenizer.model_max_length = checkpoint.max_length
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if checkpoint.do_lower_case:
        backend.normalizer = _lowercasing(backend.normalizer)
    return tokenizer


def _lowercasing(normalizer: Any) -> Any:
    """The normalizer with lowercasing before its other steps, unless it is one of them."""
    is_sequence = isinstance(normalizer, normalizers.Sequence)
    steps: list[Any] = [*normalizer] if is_sequence else [normalizer]
    if any(isinstance(step, normalizers.Lowercase) for step in steps):
        return normalizer
    return normalizers.Sequence([normalizers.Lowercase(), *(step for step in steps if step is not None)])


def _positions(config: Any) -> int | None:
    """How many tokens the model's table of positions can hold; None where there is no such table."""
    size: int = getattr(config, "max_position_embeddings", 0)
    if config.model_type in _TABLE_AFTER_PAD:
        pad: int = 1 if config.model_type == "mpnet" else config.pad_token_id  # MPNet's is fixed
        return size - pad - 1
    return size if config.model_type in _TABLE else None


def _length_limit(saved: int | None, tokenizer: Any, config: Any, wanted: int | None, problems: Problems) -> int:
    """The user's limit, else the checkpoint's, else the tokenizer's; never beyond the table of positions."""
    table = _positions(config) if config is not None else None
    if wanted is not None:
        if wanted < MIN_LENGTH:
            problems.append(f"max length {wanted} is too small: at least {MIN_LENGTH} tokens are needed")
        allowed = table or getattr(config, "max_position_embeddings", None)
        if allowed and 0 < allowed < wanted:
            problems.append(f"max length {wanted} is more than the {allowed} tokens that the model allows")
        return wanted
    limit = saved
    if limit is None and tokenizer is not None:
        size = getattr(config, "max_position_embeddings", None) or -1  # -1: XLNet's way to say none
        limit = min(tokenizer.model_max_length, size) if size > 0 else tokenizer.model_max_length
    if limit is None:
        return MIN_LENGTH  # the tokenizer's problem is already listed
    if limit > 10**9:
        problems.append("the checkpoint sets no length limit: give one with --max-length")
    if limit < MIN_LENGTH:
        problems.append(f"the checkpoint's max length {limit} is too small: at least {MIN_LENGTH} tokens are needed")
    return min(limit, table) if table else limit


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no log lines from transformers meanwhile: what matters is in our own errors."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
