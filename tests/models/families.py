"""Small random transformers of every architecture, each with its usual kind of tokenizer."""

from __future__ import annotations

import collections
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "albert", "electra")
# Rotary or relative positions, causal or local attention, grouped heads, gated layers.
NEWER = ("modernbert", "t5", "deberta-v2", "nomic_bert", "gte", "qwen2", "qwen3", "gemma3_text")
WIDTH, LAYERS, HEADS, MAX_LENGTH = 32, 2, 4, 64

# Enough to train a vocabulary of a few hundred pieces on, and to compare vectors with.
TEXTS = (
    "A lighthouse keeper counts the ships that pass before dawn.",
    "The committee postponed its decision until further evidence arrives.",
    "Rain fell on the tin roof, and nobody in the kitchen spoke.",
    "Two small dogs chase a red ball across the frozen pond.",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "She repaired the old radio with a spoon and some patience.",
    "Le train de nuit traverse la vallée sans s'arrêter.",
    "Die Brücke wurde im Winter wegen Eisgangs gesperrt.",
    "El mercado abre temprano los domingos de verano.",
    "In 1969, 2.5 million people visited; 40% came by rail.",
    "Why would anyone paint a fence twice in one week?",
    "Quantum states collapse, markets recover, bread rises.",
)

_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
_CAMEMBERT = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", "<mask>")
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
_AFTER_PAD = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}  # positions start after the padding token's id
_BERT_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}  # and heads that together are wider than the model


@dataclass(frozen=True)
class Family:
    """How to build one."""

    tokenizer: str  # its class
    kind: str
    special: tuple[str, ...]  # tokens, by id
    config: Mapping[str, Any] = field(default_factory=dict)  # what config.json has beyond the common values
    framed: str = ""  # the template of special tokens, where the class has none of its own


_BUILD = {
    "bert": Family("BertTokenizer", "wordpiece", _BERT),
    "distilbert": Family("DistilBertTokenizer", "wordpiece", _BERT),
    "electra": Family("BertTokenizer", "wordpiece", _BERT, {"embedding_size": 16}),
    "mpnet": Family("MPNetTokenizer", "wordpiece", ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"), _AFTER_PAD),
    "roberta": Family("RobertaTokenizer", "bpe", _ROBERTA, _AFTER_PAD),
    "xlm-roberta": Family("XLMRobertaTokenizer", "unigram", _ROBERTA, _AFTER_PAD),
    "camembert": Family(
        "CamembertTokenizer", "unigram", _CAMEMBERT, {**_AFTER_PAD, "bos_token_id": 5, "eos_token_id": 6}
    ),
    "albert": Family("AlbertTokenizer", "unigram", _ALBERT, {"embedding_size": 16}),
    "modernbert": Family(
        "PreTrainedTokenizerFast",
        "bpe",
        _BERT,
        {**_BERT_IDS, "local_attention": 8, "global_attn_every_n_layers": 2},
        framed="[CLS] $A [SEP]",
    ),
    "t5": Family(
        "T5Tokenizer",
        "unigram",
        ("<pad>", "</s>", "<unk>"),
        {"d_model": WIDTH, "d_kv": 16, "d_ff": 48, "num_layers": LAYERS, "num_heads": HEADS, "eos_token_id": 1},
    ),
    "deberta-v2": Family(
        "DebertaV2Tokenizer",
        "unigram",
        ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
        {
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "nomic_bert": Family("BertTokenizer", "wordpiece", _BERT),
    "gte": Family("XLMRobertaTokenizer", "unigram", _ROBERTA, {**_AFTER_PAD, "type_vocab_size": 1}),
    "qwen2": Family("Qwen2Tokenizer", "bpe", _QWEN, {"num_key_value_heads": 1}, framed="$A <|endoftext|>"),
    "qwen3": Family("Qwen2Tokenizer", "bpe", _QWEN, _GROUPED, framed="$A <|endoftext|>"),
    "gemma2": Family("GemmaTokenizer", "merges", _GEMMA, _GROUPED),
    "gemma3_text": Family(
        "GemmaTokenizer",
        "merges",
        _GEMMA,
        {
            **_GROUPED,
            "use_bidirectional_attention": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        framed="<bos> $A <eos>",
    ),
}


def write_transformer(
    folder: Path,
    name: str,
    *,
    max_length: int = MAX_LENGTH,
    padding_side: str = "right",
    hidden_states: bool = False,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Save transformer `name` and its tokenizer; `config` overrides values of config.json."""
    family = _BUILD[name]
    tokenizer = _tokenizer(family, max_length, padding_side)
    after_pad = 2 if family.config.get("pad_token_id") == 1 and name != "gte" else 0
    values = {
        "pad_token_id": 0,
        "type_vocab_size": 1 if after_pad else 2,
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 48,
        "hidden_dim": 48,
        "max_position_embeddings": max_length + after_pad,
        "output_hidden_states": hidden_states,
        **family.config,
        **(config or {}),
    }
    if name == "t5":  # whose common values have names of their own
        for alias in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            del values[alias]
    built = transformers.CONFIG_MAPPING[name](**values)
    model = transformers.T5EncoderModel(built) if name == "t5" else transformers.AutoModel.from_config(built)
    randomize(model, seed, 0.15 if name in NEWER else 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def randomize(module: nn.Module, seed: int, matrix_spread: float = 0.3) -> None:
    """Give every parameter, biases and norms too, a spread that shows in the vectors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith(("weight", "layer_weights"))
            spread = 2.0 if "word_embeddings" in name else 0.1 if parameter.ndim == 1 else matrix_spread
            parameter.copy_(float(is_scale) + spread * torch.randn(parameter.shape, generator=generator))


def _tokenizer(family: Family, max_length: int, padding_side: str) -> Any:
    options: dict[str, Any] = {"model_max_length": max_length, "padding_side": padding_side}
    trained = _vocabulary(family.kind, family.special)
    if family.tokenizer == "PreTrainedTokenizerFast":
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        backend = Tokenizer(models.BPE(**trained))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        options |= {"tokenizer_object": backend, **dict(zip(names, family.special, strict=True))}
    else:
        options |= {**trained, "do_lower_case": True}
    if family.tokenizer == "T5Tokenizer":
        options["extra_ids"] = 0
    tokenizer = getattr(transformers, family.tokenizer)(**options)
    if family.framed:
        ids = [(token, family.special.index(token)) for token in family.special if token in family.framed]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=family.framed, special_tokens=ids
        )
    return tokenizer


@functools.cache
def _vocabulary(kind: str, special: tuple[str, ...]) -> dict[str, Any]:
    """Constructor arguments of a tokenizer made from `TEXTS`, the same in every process.

    Only BPE is trained: the trainers of WordPiece and Unigram give another vocabulary each time.
    """
    if kind == "wordpiece":
        words = sorted({word for text in TEXTS for word in re.findall(r"\w+|[^\w\s]", text.lower())})
        letters = sorted(set("".join(words)))
        inside = sorted({f"##{word[at : at + 2]}" for word in words for at in range(2, len(word) - 1, 2)})
        starts = sorted({word[:2] for word in words})
        pieces = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *words, *starts, *inside])
        return {"vocab": {piece: index for index, piece in enumerate(pieces)}}
    if kind == "unigram":
        words = [f"▁{word}" for text in TEXTS for word in text.split()]
        parts = [word[at : at + 2] for word in words for at in range(0, len(word) - 1, 2)]
        counts = collections.Counter([*"".join(words), *words[::2], *parts])
        scores = {piece: math.log(count / counts.total()) for piece, count in counts.items()}
        return {"vocab": [*((token, 0.0) for token in special), *sorted(scores.items(), key=lambda item: -item[1])]}
    unknown = next(token for token in (*special, "<unk>") if "unk" in token.lower())
    options: dict[str, Any] = {"vocab_size": 400, "special_tokens": list(special), "show_progress": False}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}
