"""`engine.tokenizer` gives what the checkpoint's own Hugging Face tokenizer gives."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbert_infer import Engine
from sbert_infer.text.hugging_face import HuggingFaceTokenizer

LONG = "many words " * 300
TEXTS = ["A cat sat on the mat.", "rain, rain!", "unbelievably good naïveté"]

CALLS: dict[str, Callable[[Any], Any]] = {
    "one text": lambda t: t(TEXTS[0]),
    "texts": lambda t: t(TEXTS),
    "a pair": lambda t: t("a cat", "a dog"),
    "pairs": lambda t: t(["a cat", "rain"], ["a dog", "snow"]),
    "tensors": lambda t: t(TEXTS, padding=True, truncation=True, return_tensors="pt"),
    "arrays": lambda t: t(TEXTS, padding=True, return_tensors="np"),
    "padded to a length": lambda t: t(TEXTS, padding="max_length", max_length=20),
    "cut": lambda t: t(LONG, truncation=True),
    "cut to a length": lambda t: t([LONG, "a"], truncation=True, max_length=7),
    "cut pair": lambda t: t(LONG, "a dog", truncation="only_first", max_length=12),
    "no special tokens": lambda t: t(TEXTS, add_special_tokens=False),
    "more columns": lambda t: t("a cat", return_offsets_mapping=True, return_special_tokens_mask=True),
    "fewer columns": lambda t: t("a cat", return_attention_mask=False, return_token_type_ids=False),
    "attribute": lambda t: t("a cat").input_ids,
    "encode": lambda t: t.encode(LONG),
    "encode for a text splitter": lambda t: t.encode(LONG, max_length=2**32, truncation="do_not_truncate"),
    "encode plain": lambda t: t.encode(TEXTS[0], add_special_tokens=False),
    "decode": lambda t: t.decode(t.encode(TEXTS[0])),
    "decode a text": lambda t: t.decode(t.encode(TEXTS[0]), skip_special_tokens=True),
    "decode a tensor": lambda t: t.decode(t(TEXTS[0], return_tensors="pt")["input_ids"][0]),
    "batch_decode": lambda t: t.batch_decode(t(TEXTS)["input_ids"], skip_special_tokens=True),
    "tokenize": lambda t: t.tokenize(TEXTS[2]),
    "ids to tokens": lambda t: t.convert_ids_to_tokens([101, 1037, 102]),
    "id to token": lambda t: t.convert_ids_to_tokens(1037),
    "tokens to ids": lambda t: t.convert_tokens_to_ids(["cat", "no such token"]),
    "token to id": lambda t: t.convert_tokens_to_ids("cat"),
    "tokens to string": lambda t: t.convert_tokens_to_string(t.tokenize(TEXTS[2])),
    "sizes": lambda t: (len(t), t.vocab_size, t.model_max_length, t.num_special_tokens_to_add(True)),
    "vocabulary": lambda t: (t.get_vocab() == t.vocab, t.vocab["cat"]),
    "special tokens": lambda t: [t.cls_token, t.sep_token, t.unk_token, t.mask_token, t.pad_token, t.eos_token],
    "special ids": lambda t: [t.cls_token_id, t.sep_token_id, t.unk_token_id, t.pad_token_id, t.bos_token_id],
    "all special": lambda t: (sorted(t.all_special_tokens), sorted(t.all_special_ids), t.special_tokens_map),
    "sides": lambda t: (t.padding_side, t.truncation_side, t.model_input_names, t.is_fast),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_hugging_face_does(name: str, engine: Engine, minilm: Any) -> None:
    found, expected = CALLS[name](engine.tokenizer), CALLS[name](minilm.tokenizer)
    if not hasattr(expected, "keys"):
        assert found == expected
        return
    assert list(found) == list(expected)
    for key in expected:
        assert isinstance(found[key], type(expected[key]))
        ours, theirs = (each.tolist() if hasattr(each, "tolist") else each for each in (found[key], expected[key]))
        assert ours == theirs


def test_without_what_newer_artifacts_say(engine: Engine) -> None:
    tokenizer = HuggingFaceTokenizer(engine.artifact.tokenizer_json, model_max_length=8, pad_token_id=0)
    assert list(tokenizer("a cat")) == ["input_ids", "attention_mask"]
    assert (tokenizer.pad_token, tokenizer.cls_token) == ("[PAD]", None)


def test_a_roberta(export_checkpoint: Callable[..., Path], make_checkpoint: Callable[..., Path]) -> None:
    import transformers

    expected = transformers.AutoTokenizer.from_pretrained(make_checkpoint("roberta"))
    with Engine(export_checkpoint("roberta")) as engine:
        assert engine.tokenizer(TEXTS) == dict(expected(TEXTS))
        assert engine.tokenizer.special_tokens_map == expected.special_tokens_map
        assert engine.tokenizer.decode(engine.tokenizer.encode("a cat")) == expected.decode(expected.encode("a cat"))


def test_copies(engine: Engine) -> None:
    for copied in (copy.deepcopy(engine.tokenizer), pickle.loads(pickle.dumps(engine.tokenizer))):  # noqa: S301  # ours
        assert copied("A cat sat.", padding="max_length") == engine.tokenizer("A cat sat.", padding="max_length")


def test_nothing_is_ignored(engine: Engine) -> None:
    for name, message in {
        "model_max_length": "set max_seq_length of the engine",
        "padding_side": "would not notice",
    }.items():
        with pytest.raises(AttributeError, match=message):
            setattr(engine.tokenizer, name, 3)
    with pytest.raises(AttributeError, match=r"no .chat_template.; see its backend_tokenizer"):
        _ = engine.tokenizer.chat_template
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"truncation": "some"}, "truncation must be"),
        ({"padding": "some"}, "padding must be"),
        ({"return_tensors": "tf"}, "'pt' or 'np', got 'tf'"),
        ({"return_tensors": "np"}, "give padding=True"),
    ]
    for options, problem in wrong:
        with pytest.raises(ValueError, match=problem):
            engine.tokenizer(TEXTS, **options)
