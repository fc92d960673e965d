"""`Engine.encode` gives the vectors of sentence-transformers, for any text in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sbert_infer import Engine
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.graphs import assert_close

Vectors = npt.NDArray[np.float32]

HARD_TEXTS = (
    *ODD_TEXTS,
    " \t\n ",
    "nul\x00inside",
    "\x00",
    "\ufeffmark \u200bzero width",
    "Ωμέγα, кириллица, עברית, العربية, हिन्दी",
    "e\u0301 is é, and ﬁ is fi",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇪🇺",
    "[CLS] [SEP] [MASK] [PAD] [UNK] ##ing",
    "antidisestablishmentarianism" * 8,
    "x" * 500,
    "long " * 1000,
)


def assert_parity(vectors: Vectors, expected: Vectors) -> None:
    """Check the project's promise for FP32."""
    assert vectors.shape == expected.shape
    assert vectors.dtype == np.float32
    norms = np.linalg.norm(vectors, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert ((vectors * expected).sum(-1) / norms).min() >= 0.99999
    assert np.abs(vectors - expected).max() <= 2e-5


def test_minilm_batched(engine: Engine, minilm: Any) -> None:
    texts = [*HARD_TEXTS, *TEXTS]
    assert_parity(engine.encode(texts), minilm.encode(texts))


def test_minilm_alone(engine: Engine, minilm: Any) -> None:
    for text in HARD_TEXTS:
        assert_parity(engine.encode(text), minilm.encode(text))


@pytest.mark.parametrize("options", [{"pooling": ("lasttoken",), "padding_side": "left", "normalize": False}])
def test_left_padding_and_spaces_that_count(
    options: dict[str, Any], export_checkpoint: Callable[..., Path], make_checkpoint: Callable[..., Path]
) -> None:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(make_checkpoint("roberta", **options)), device="cpu")
    with Engine(export_checkpoint("roberta", **options), on_truncate="ignore") as engine:
        vectors, expected = engine.encode(HARD_TEXTS), reference.encode(list(HARD_TEXTS))
    assert_close(vectors, expected, 2e-5)
    spaced, plain = HARD_TEXTS.index(" "), HARD_TEXTS.index("")
    assert np.abs(vectors[spaced] - vectors[plain]).max() > 0.01  # the space makes a difference


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_vector_does_not_depend_on_its_batch(
    precision: str, minilm_onnx: Path, export_checkpoint: Callable[..., Path]
) -> None:
    path = minilm_onnx if precision == "fp32" else export_checkpoint("bert", int8=True)
    texts = [*HARD_TEXTS, *TEXTS]
    with Engine(path, on_truncate="ignore") as engine:
        alone = np.stack([engine.encode(text) for text in texts])
        runs = [
            engine.encode(texts),
            engine.encode(texts[::-1])[::-1],
            engine.encode(texts, batch_size=1),
            engine.encode(texts, batch_size=3),
            engine.encode([text for text in texts for _ in range(2)])[::2],
        ]
    for budget in (1, 100, 100_000):  # in tokens; with the last one, everything runs as one batch
        with Engine(path, on_truncate="ignore", max_batch_tokens=budget, workers=3) as engine:
            runs.append(engine.encode(texts))
    for vectors in runs:
        assert np.abs(vectors - alone).max() <= 1e-6


def test_more_texts_than_one_window_keep_their_order(
    small: Engine, small_reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 7)
    texts = [f"{text} {number}" for number in range(3) for text in TEXTS]  # 36 texts, 6 windows, the last not full
    texts += texts[:9]  # duplicates in other windows
    np.testing.assert_allclose(small.encode(texts), small_reference.encode(texts), atol=2e-5, rtol=0)
    assert small.last_stats.texts == 45


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([None], "text 0 must be a str, got NoneType: None"),
        (["a", "b", 7], "text 2 must be a str, got int: 7"),
        (["a", float("nan")], "text 1 must be a str, got float: nan"),
        ([b"bytes"], "text 0 must be a str, got bytes: b'bytes'"),
        (["a", ["nested", "list"]], r"text 1 must be a str, got list: \['nested', 'list'\]"),
        ([("a", "pair")], "text 0 must be a str, got tuple"),
        ([{"text": "a", "image": "b.png"}], "text 0 must be a str, got dict"),
        ([{"text": 7}], "text 0 must be a str, got int: 7"),
        (None, "encode needs texts"),
        (7, "got int"),
        (3.5, "got float"),
        (b"bytes", "got bytes"),
        (bytearray(b"bytes"), "got bytearray"),
        ({"text": "a", "image": "b.png"}, "got dict"),
        (MappingProxyType({"text": "a"}), "got mappingproxy"),
        ({"a", "b"}, "got set"),
        (frozenset("ab"), "got frozenset"),
        ({"a": 1}.keys(), "got dict_keys"),
        (np.array(1.0), "got float"),
        (np.array([["a", "b"]]), "ndarray with 2"),
        (np.array([1.0]), "text 0 must be a str, got float"),
    ],
)
def test_what_is_no_text_is_named(texts: Any, message: str, small: Engine) -> None:
    with pytest.raises(TypeError, match=message) as raised:
        small.encode(texts)
    assert "\n" not in str(raised.value)


def test_a_table_is_no_list_of_texts(small: Engine) -> None:
    class Table(list[str]):  # like a DataFrame of pandas: two dimensions, and iterates over column names
        ndim = 2

    with pytest.raises(TypeError, match="Table with 2"):
        small.encode(Table(["a column"]))


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff here", "é\udc80"])
def test_a_lone_surrogate_is_named(text: str, small: Engine) -> None:
    with pytest.raises(ValueError, match="text 1 holds a lone surrogate"):
        small.encode(["fine", text])
    with pytest.raises(ValueError, match="prompt holds a lone surrogate"):
        small.encode("fine", prompt=text)
    small.encode("🙂 has a pair of them in UTF-16 only")


def test_the_index_of_a_bad_text_counts_all_texts(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.encode.pipeline.WINDOW_TEXTS", 4)
    with pytest.raises(TypeError, match="text 9 must be a str"):
        small.encode([*"abcdefghi", None])  # type: ignore[list-item]
    assert small.encode("still works").shape == (24,)


@pytest.mark.parametrize("unit", ["word ", "wörter, ", "x", "漢字", "line\n", " "])
def test_a_megabyte_of_text(unit: str, engine: Engine, minilm: Any) -> None:
    text = unit * (1_000_000 // len(unit.encode()))
    limited = minilm.encode(text[:20_000])  # already over the limit, so it has the vector of the whole
    assert_parity(engine.encode(text), limited)
