"""Small random checkpoints of every family, saved by sentence-transformers itself or rewritten to its old layout."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling, WeightedLayerPooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "albert", "electra")
WIDTH, LAYERS, MAX_LENGTH = 32, 3, 64

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
) -> Path:
    """Write one into `folder` and return it. `pooling` and `dense` are spelled as sentence-transformers does.

    `layer_pooling` is the first layer of a WeightedLayerPooling; each of `dense` holds the arguments of one Dense,
    less `in_features`, and with `activation_function` as a name in `torch.nn`. `lower_case` is `do_lower_case`.
    """
    _write_transformer(folder, family, max_length, padding_side, layer_pooling is not None, seed)
    modules: list[nn.Module] = [Transformer(str(folder))]
    if layer_pooling is not None:
        modules.append(WeightedLayerPooling(WIDTH, num_hidden_layers=LAYERS, layer_start=layer_pooling))
    modules.append(Pooling(WIDTH, pooling_mode=list(pooling), include_prompt=include_prompt))
    width = WIDTH * len(pooling)
    for arguments in dense:
        activation = getattr(nn, arguments.get("activation_function", "Tanh"))()
        modules.append(Dense(width, **{**arguments, "activation_function": activation}))
        width = arguments["out_features"]
    modules += [LayerNorm(width)] * layer_norm + [Normalize()] * normalize
    for module in modules[1:]:
        randomize(module, seed + 1)
    model = SentenceTransformer(
        modules=modules,
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


def randomize(module: nn.Module, seed: int) -> None:
    """Give every parameter, biases and norms too, a spread that shows in the vectors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith(("weight", "layer_weights"))
            spread = 2.0 if "word_embeddings" in name else 0.1 if parameter.ndim == 1 else 0.3
            parameter.copy_(float(is_scale) + spread * torch.randn(parameter.shape, generator=generator))


def to_old_layout(folder: Path, max_length: int) -> None:
    """Rewrite a checkpoint as sentence-transformers 2 saved it: old types, old keys, `.bin` weights."""
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


# ------------------------------------------------------------------------------------ transformers and tokenizers

_SPECIAL_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_SPECIAL_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_SPECIAL_ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
_SPECIAL_CAMEMBERT = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", "<mask>")
_PLAIN_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}

# family -> tokenizer class, its kind, its special tokens by id, what config.json has beyond the common values
_BUILD: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "bert": ("BertTokenizer", "wordpiece", _SPECIAL_BERT, {}),
    "distilbert": ("DistilBertTokenizer", "wordpiece", _SPECIAL_BERT, {}),
    "electra": ("BertTokenizer", "wordpiece", _SPECIAL_BERT, {"embedding_size": 16}),
    "mpnet": ("MPNetTokenizer", "wordpiece", ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"), _PLAIN_IDS),
    "roberta": ("RobertaTokenizer", "bpe", _SPECIAL_ROBERTA, _PLAIN_IDS),
    "xlm-roberta": ("XLMRobertaTokenizer", "unigram", _SPECIAL_ROBERTA, _PLAIN_IDS),
    "camembert": (
        "CamembertTokenizer",
        "unigram",
        _SPECIAL_CAMEMBERT,
        {**_PLAIN_IDS, "bos_token_id": 5, "eos_token_id": 6},
    ),
    "albert": ("AlbertTokenizer", "unigram", _SPECIAL_ALBERT, {"embedding_size": 16}),
}


def _write_transformer(
    folder: Path, family: str, max_length: int, padding_side: str, hidden_states: bool, seed: int
) -> None:
    class_name, kind, special, extra = _BUILD[family]
    tokenizer_class = getattr(transformers, class_name)
    tokenizer = tokenizer_class(
        **_train(kind, special), model_max_length=max_length, padding_side=padding_side, do_lower_case=True
    )
    offset = 2 if "pad_token_id" in extra else 0  # positions start behind the padding token's id
    config = transformers.CONFIG_MAPPING[family](
        **{"pad_token_id": 0, "type_vocab_size": 1 if offset else 2, **extra},
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dim=48,
        max_position_embeddings=max_length + offset,
        output_hidden_states=hidden_states,
    )
    model = transformers.AutoModel.from_config(config)
    randomize(model, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@functools.cache
def _train(kind: str, special: tuple[str, ...]) -> dict[str, Any]:
    """Constructor arguments of a tokenizer trained on `TEXTS`."""
    options: dict[str, Any] = {"vocab_size": 400, "special_tokens": list(special), "show_progress": False}
    build: dict[str, Callable[[], tuple[Tokenizer, Any]]] = {
        "wordpiece": lambda: (Tokenizer(models.WordPiece(unk_token="[UNK]")), trainers.WordPieceTrainer(**options)),
        "bpe": lambda: (
            Tokenizer(models.BPE()),
            trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options),
        ),
        "unigram": lambda: (Tokenizer(models.Unigram()), trainers.UnigramTrainer(unk_token="<unk>", **options)),
    }
    tokenizer, trainer = build[kind]()
    if kind == "wordpiece":
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = {
        "wordpiece": pre_tokenizers.BertPreTokenizer(),
        "bpe": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "unigram": pre_tokenizers.Metaspace(),
    }[kind]
    tokenizer.train_from_iterator(TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    if kind == "unigram":
        return {"vocab": [tuple(piece) for piece in model["vocab"]]}
    if kind == "bpe":
        return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}
    return {"vocab": model["vocab"]}
