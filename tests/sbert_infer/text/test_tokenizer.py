"""Token ids: those of the whole text, though a long one is cut before it is tokenized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sbert_infer.text.tokenizer import Tokenizer
from tests.models.checkpoints import ODD_TEXTS, TEXTS

LIMIT = 8
KINDS = ("bert", "roberta", "xlm-roberta", "metaspace", "nothing")  # WordPiece, byte-level BPE, Unigram, bare ones

WORDS = st.one_of(
    st.sampled_from([word for text in TEXTS for word in text.split()]),
    st.sampled_from(["[SEP]", "<mask>", "</s>", "e\u0301", "ﬁ", "漢字", "🙂", "\u0301", "\x00", "don't", "1969"]),
    st.text(max_size=8).filter(lambda text: text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)),
)
GAPS = st.sampled_from([" ", "  ", "\n", "\t", " \n ", "", "\u3000", "\u00a0", "-", "     "])


@st.composite
def long_texts(draw: st.DrawFn) -> str:
    """Some pieces, repeated with changes until the text is long enough to be cut for `LIMIT` tokens."""
    pieces = draw(st.lists(st.tuples(WORDS, GAPS), min_size=1, max_size=12))
    text = "".join(word + gap for word, gap in pieces) or " "
    return text * draw(st.integers(1, 1 + 3000 // len(text)))


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Tokenizer:
    family = request.param if request.param in ("bert", "roberta") else "xlm-roberta"
    backend = tokenizers.Tokenizer.from_file(str(make_checkpoint(family) / "tokenizer.json"))
    if request.param in ("metaspace", "nothing"):
        backend.normalizer = None
    if request.param == "nothing":  # the whole text is one word: no prefix can be trusted
        backend.pre_tokenizer = None
    return Tokenizer(backend.to_str(), LIMIT)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend.encode(text).ids
    return ids


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=long_texts())
def test_a_long_text_gives_the_ids_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer([text]).ids.tolist() == whole(tokenizer, text)


@pytest.mark.parametrize(
    "text",
    [
        " " * 5000,
        "a" + " " * 5000 + "b",
        "\n" * 5000,
        "x" * 5000,
        "one two " + "x" * 5000,
        "line\n" * 1000,
        "漢字" * 2500,
        "e" + "\u0301" * 5000,
        "[SEP]" * 1000,
        "[SEP] " * 1000,
        "🙂" * 2000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_long_texts_of_one_kind(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer([text]).ids.tolist() == whole(tokenizer, text)


def test_a_special_token_across_the_cut(tokenizer: Tokenizer) -> None:
    for spaces in range(16):
        text = "🙂🙂🙂🙂🙂🙂🙂🙂🙂🙂 " * 5 + " " * spaces + "[SEP]<mask> and more" * 50
        assert tokenizer([text]).ids.tolist() == whole(tokenizer, text)


def test_the_end_of_a_long_word_can_change_its_beginning() -> None:
    model = tokenizers.models.WordPiece(
        {"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]", max_input_chars_per_word=9999
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(backend.to_str(), LIMIT)
    word = "a" * 2100  # long enough to be cut; the time that WordPiece takes grows with the cube
    assert tokenizer([word]).ids.tolist() == [1] + [2] * (LIMIT - 1)
    assert tokenizer([f"{word}b"]).ids.tolist() == [0]


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_long_texts_are_cut(family: str, make_checkpoint: Callable[..., Path]) -> None:
    json = (make_checkpoint(family) / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer(json, 64)
    text = " ".join(TEXTS) * 1000
    assert len(tokenizer._prefix(text)) <= 2048
    tokenized = tokenizer([text, TEXTS[0]])
    assert tokenized.truncated.tolist() == [True, len(tokenizer.backend.encode(TEXTS[0]).overflowing) > 0]
    left = Tokenizer(json, 64, "left")  # its end counts
    assert left([text]).ids.tolist() == left.backend.encode(text).ids
    assert left([text]).ids.tolist() != tokenizer([text]).ids.tolist()


def test_what_the_file_bakes_in_does_not_count(make_checkpoint: Callable[..., Path]) -> None:
    backend = tokenizers.Tokenizer.from_file(str(make_checkpoint("bert") / "tokenizer.json"))
    plain = Tokenizer(backend.to_str(), 32)
    backend.enable_padding(length=128)
    backend.enable_truncation(5)
    baked = Tokenizer(backend.to_str(), 32)
    for expected, found in zip(vars(plain(TEXTS)).values(), vars(baked(TEXTS)).values(), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_is_what_transformers_pads(side: str, make_checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    folder = make_checkpoint("roberta")
    reference = AutoTokenizer.from_pretrained(str(folder), padding_side=side)
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text(encoding="utf-8"), 64)
    texts = [*ODD_TEXTS, *TEXTS]
    tokenized = tokenizer(texts)
    rows = np.array([3, 0, 11, 2])
    length = int(tokenized.lengths[rows].max())
    ids, mask, types = tokenized.padded(rows, length, reference.pad_token_id, side)
    expected = reference(
        [texts[row] for row in rows], padding=True, truncation=True, max_length=64, return_tensors="np"
    )
    np.testing.assert_array_equal(ids, expected["input_ids"])
    np.testing.assert_array_equal(mask, expected["attention_mask"])
    assert ids.dtype == mask.dtype == np.int64
    assert types is None


def test_prompt_length(make_checkpoint: Callable[..., Path]) -> None:
    tokenizer = Tokenizer((make_checkpoint("bert") / "tokenizer.json").read_text(encoding="utf-8"), 64)
    assert tokenizer.prompt_length("") == 0
    prompt = "the rain: "
    assert tokenizer.prompt_length(prompt) == len(tokenizer.backend.encode(prompt)) - 1
