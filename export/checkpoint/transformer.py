"""The pretrained transformer of a checkpoint: its config, its tokenizer and its length limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers
import transformers
from tokenizers import normalizers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.checkpoint.hub import first_line, shown
from sbert_infer.export.checkpoint.modules import Problems, read_json

TokenCounter: TypeAlias = Callable[[Sequence[Any]], list[int]]  # of texts, or of pairs of texts

MIN_LENGTH = 3  # a leading and a trailing special token, and one of the text
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spiece.model", "spm.model"),
)
# Encoder-decoder models whose encoder is used, as sentence-transformers does.
ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
# Values of config.json as Nomic's own code spells them, after GPT-2.
_OTHER_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
# Models with a table of learned positions: longer texts crash, so it bounds every length limit.
_TABLE = {"albert", "bert", "convbert", "distilbert", "electra", "ernie", "mobilebert", "squeezebert"}
# Decoders, causal or not, whose positions are relative.
_ROTARY_DECODERS = {
    *("gemma", "gemma2", "gemma3_text", "llama", "ministral", "mistral", "modernbert-decoder", "olmo2", "phi3"),
    *("qwen2", "qwen3", "smollm3"),
}
# As in `_TABLE`, but the positions of real tokens start after the padding token's id.
_TABLE_AFTER_PAD = {
    *("camembert", "data2vec-text", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
}


def read_config(folder: Path, root: Path, trust_remote_code: bool, problems: Problems) -> Any:
    """The transformer's config as transformers sees it; None after a problem."""
    name = f"{shown(folder, root)}config.json"
    if (folder / "adapter_config.json").is_file():
        problems.append(
            f"{shown(folder, root)}adapter_config.json: for this kind of model, adapters (PEFT) are not supported; "
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
    except Exception as error:  # a config class may raise anything for bad values
        problems.append(f"{name}: transformers can't read it: {first_line(error)}")
        return None
    problems += _unread_values(raw, config, name)
    if config.is_encoder_decoder and config.model_type not in ENCODERS:
        problems.append(f"{name}: encoder-decoder models are not supported, except {', '.join(ENCODERS)}")
    if getattr(config, "hidden_size", None) is None:
        problems.append(f"{name}: a {config.model_type} has no single 'hidden_size'; only text encoders are supported")
        return None
    return config


def _unread_values(raw: dict[str, Any], config: Any, name: str) -> list[str]:
    """Values whose names transformers does not know, so that it used its defaults instead."""
    rope = getattr(config, "rope_parameters", None)
    taken = {key: getattr(config, ours, None) for key, ours in _OTHER_NAMES.items()}
    taken["rotary_emb_base"] = rope.get("rope_theta") if isinstance(rope, dict) else None
    return [
        f"{name}: '{key}' is {raw[key]!r}, but transformers takes {value!r} for a {config.model_type}; "
        "if the checkpoint brings its own code: --trust-remote-code"
        for key, value in taken.items()
        if key in raw and value is not None and raw[key] != value
    ]


def read_tokenizer(folder: Path, root: Path, own: bool, trust_remote_code: bool, problems: Problems) -> Any:
    """The tokenizer, checked; None after a problem."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        problems.append(f"{shown(folder, root) or 'the folder'} has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
        return None
    try:
        tokenizer = _auto_tokenizer(folder, trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exceptions
        problems.append(f"the tokenizer can't be loaded: {first_line(error)}")
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
    """The checkpoint's fast tokenizer, with the checkpoint's own length limit."""
    tokenizer = _auto_tokenizer(checkpoint.transformer_path, checkpoint.trust_remote_code)
    tokenizer.model_max_length = checkpoint.max_length
    if checkpoint.model_type in _TABLE | _ROTARY_DECODERS:
        # Positions count from the first column, so padding there would make a vector depend on its
        # batch. Relative positions would not, but a causal model never sees padding on the right.
        tokenizer.padding_side = "right"
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if checkpoint.do_lower_case:
        backend.normalizer = _lowercasing(backend.normalizer)
    return tokenizer


def _lowercasing(normalizer: Any) -> Any:
    """The normalizer with lowercasing as its first step, unless it already has such a step."""
    is_sequence = isinstance(normalizer, normalizers.Sequence)
    steps: list[Any] = [*normalizer] if is_sequence else [normalizer]
    if any(isinstance(step, normalizers.Lowercase) for step in steps):
        return normalizer
    return normalizers.Sequence([normalizers.Lowercase(), *(step for step in steps if step is not None)])


def plain_tokenizer_json(tokenizer: Any) -> str:
    """tokenizer.json without truncation and padding, which the manifest defines instead."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    return json.dumps(content, ensure_ascii=False)


def token_counter(tokenizer_json: str) -> TokenCounter:
    """A function that counts tokens, special ones included, without truncation."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    return lambda texts: [len(encoding) for encoding in tokenizer.encode_batch_fast(texts)]


def length_limit(saved: int | None, tokenizer: Any, config: Any, wanted: int | None, problems: Problems) -> int:
    """The user's limit, the checkpoint's or the tokenizer's, within the table of positions."""
    table = positions(config) if config is not None else None
    if wanted is not None:
        if wanted < MIN_LENGTH:
            problems.append(f"max length {wanted} is too small: at least {MIN_LENGTH} tokens are needed")
        allowed = table or getattr(config, "max_position_embeddings", None)
        if allowed and 0 < allowed < wanted:
            problems.append(f"max length {wanted} is more than the {allowed} tokens that the model allows")
        return wanted
    limit = saved
    if limit is None and tokenizer is not None:
        size = getattr(config, "max_position_embeddings", None) or -1  # XLNet uses -1 for none
        limit = min(tokenizer.model_max_length, size) if size > 0 else tokenizer.model_max_length
    if limit is None:
        return MIN_LENGTH  # the tokenizer's problem is already listed
    if limit > 10**9:
        problems.append("the checkpoint sets no length limit: give one with --max-length")
    if limit < MIN_LENGTH:
        problems.append(f"the checkpoint's max length {limit} is too small: at least {MIN_LENGTH} tokens are needed")
    return min(limit, table) if table else limit


def positions(config: Any) -> int | None:
    """The number of tokens that the model's table of positions holds; None without a table."""
    size: int = getattr(config, "max_position_embeddings", 0)
    if config.model_type in _TABLE | _TABLE_AFTER_PAD:
        return size - first_position(config)
    return None


def first_position(config: Any) -> int:
    """The position of a text's first token: 0, or the one after the padding token's id."""
    if config.model_type not in _TABLE_AFTER_PAD:
        return 0
    return 2 if config.model_type == "mpnet" else int(config.pad_token_id) + 1  # MPNet's is fixed


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and logs of transformers: our own errors say what matters."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
