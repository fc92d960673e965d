"""Every argument of `encode` does what it does in sentence-transformers, or an error names it."""

from __future__ import annotations

import logging
from collections import UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sbert_infer import Engine, SbertInferWarning
from tests.models.checkpoints import TEXTS

MANY = [f"{text} {number}" for number in range(9) for text in TEXTS]  # 108: enough for stable ranges


def close(vectors: Any, expected: Any) -> None:
    assert np.shape(vectors) == np.shape(expected)
    np.testing.assert_allclose(vectors, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt_name": "query"},
        {"prompt_name": "other"},
        {"prompt": "my own words: "},
        {"prompt": ""},
    ],
)
def test_prompts(method: str, options: dict[str, Any], small: Engine, small_reference: Any) -> None:
    vectors = getattr(small, method)(TEXTS, **options)
    close(vectors, getattr(small_reference, method)(list(TEXTS), **options))


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_the_prompt_wins_over_a_prompt_name(method: str, small: Engine, small_reference: Any) -> None:
    options = {"prompt": "this one wins: ", "prompt_name": "query"}
    with pytest.warns(SbertInferWarning, match="prompt_name 'query' has no effect"):
        vectors = getattr(small, method)(TEXTS, **options)
    close(vectors, getattr(small_reference, method)(list(TEXTS), **options))


def test_each_prompt_has_its_own_vectors(small: Engine) -> None:
    text = TEXTS[0]
    every = [small.encode(text), small.encode_query(text), small.encode_document(text), small.encode(text, prompt="")]
    for index, vector in enumerate(every):
        for other in every[:index]:
            assert np.abs(vector - other).max() > 0.01


def test_prompts_can_be_changed(small: Engine, small_reference: Any) -> None:
    small.prompts["mine"] = "sorted by mood: "
    small.default_prompt_name = "mine"
    close(small.encode(TEXTS), small_reference.encode(list(TEXTS), prompt="sorted by mood: "))
    del small.prompts["document"]
    small.prompts["passage"] = "from a book: "
    close(small.encode_document(TEXTS), small_reference.encode(list(TEXTS), prompt="from a book: "))
    small.default_prompt_name = None
    close(small.encode(TEXTS), small_reference.encode(list(TEXTS), prompt=""))


def test_truncate_dim(small: Engine, small_reference: Any) -> None:
    assert small.encode(TEXTS).shape == (len(TEXTS), 24)  # the checkpoint's own setting
    assert small.get_embedding_dimension() == small_reference.get_embedding_dimension() == 24
    for dim in (1, 7, 32, 1000):
        close(small.encode(TEXTS, truncate_dim=dim), small_reference.encode(list(TEXTS), truncate_dim=dim))
    with small.truncate_embeddings(5), small_reference.truncate_embeddings(5):
        close(small.encode(TEXTS), small_reference.encode(list(TEXTS)))
        assert small.get_sentence_embedding_dimension() == 5
    with pytest.raises(KeyError), small.truncate_embeddings(5):
        raise KeyError
    assert small.truncate_dim == 24
    small.truncate_dim = None
    assert small.encode(TEXTS[0]).shape == (32,) == (small.get_embedding_dimension(),)


def test_normalize_embeddings_comes_after_truncation(small: Engine, small_reference: Any) -> None:
    options: dict[str, Any] = {"normalize_embeddings": True, "truncate_dim": 6}
    vectors = small.encode(TEXTS, **options)
    close(vectors, small_reference.encode(list(TEXTS), **options))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precision(precision: Any, small: Engine) -> None:
    from sentence_transformers.util import quantize_embeddings

    vectors = small.encode(MANY, precision=precision, normalize_embeddings=True)
    expected = quantize_embeddings(small.encode(MANY, normalize_embeddings=True), precision)
    assert vectors.dtype == expected.dtype
    np.testing.assert_array_equal(vectors, expected)
    tensor = small.encode(MANY, precision=precision, normalize_embeddings=True, convert_to_tensor=True)
    np.testing.assert_array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_precision_of_one_text(precision: Any, small: Engine, small_reference: Any) -> None:
    np.testing.assert_array_equal(
        small.encode(TEXTS[0], precision=precision), small_reference.encode(TEXTS[0], precision=precision)
    )


def test_ranges_of_few_texts(small: Engine) -> None:
    with pytest.raises(ValueError, match="precision='int8' needs several texts"):
        small.encode(TEXTS[0], precision="int8")
    with pytest.warns(SbertInferWarning, match="from only 12 embeddings") as caught:
        small.encode_query(TEXTS, precision="uint8")
    assert [warning.filename for warning in caught] == [__file__]  # the user's line, not one of ours


def test_precision_may_be_none(small: Engine) -> None:
    np.testing.assert_array_equal(small.encode(TEXTS, precision=None), small.encode(TEXTS))


def test_tensors(small: Engine) -> None:
    import torch

    vectors = small.encode(TEXTS)
    tensor = small.encode(TEXTS, convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), vectors)
    rows = small.encode(TEXTS, convert_to_numpy=False)
    assert isinstance(rows, list)
    assert all(isinstance(row, torch.Tensor) for row in rows)
    np.testing.assert_array_equal(torch.stack(rows).numpy(), vectors)
    one = small.encode(TEXTS[0], convert_to_tensor=True)
    assert isinstance(one, torch.Tensor)
    assert one.shape == (24,)
    assert isinstance(small.encode(TEXTS[0], convert_to_numpy=False), torch.Tensor)


def test_no_texts(small: Engine, small_reference: Any) -> None:
    import torch

    options: list[dict[str, Any]] = [{}, {"precision": "int8"}, {"normalize_embeddings": True}, {"truncate_dim": 3}]
    for chosen in options:
        vectors = small.encode([], **chosen)
        assert isinstance(vectors, np.ndarray)
        assert vectors.shape == small_reference.encode([], **chosen).shape
    tensor = small.encode([], convert_to_tensor=True)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape == small_reference.encode([], convert_to_tensor=True).shape
    assert small.encode([], convert_to_numpy=False) == []
    assert small.last_stats.texts == 0


@pytest.mark.parametrize(
    "collect",
    [
        tuple,
        np.array,
        deque,
        UserList,
        iter,
        lambda texts: (text for text in texts),
        lambda texts: np.array(texts, "O"),
    ],
    ids=["tuple", "array", "deque", "UserList", "iterator", "generator", "array of objects"],
)
def test_collections_of_texts(collect: Callable[[list[str]], Any], small: Engine) -> None:
    expected = small.encode(list(TEXTS))
    np.testing.assert_array_equal(small.encode(collect(list(TEXTS))), expected)
    np.testing.assert_array_equal(small.encode(sentences=collect(list(TEXTS))), expected)


def test_one_text(small: Engine) -> None:
    for text in (TEXTS[0], np.str_(TEXTS[0]), type("Text", (str,), {})(TEXTS[0])):
        assert small.encode(text).shape == (24,)
    np.testing.assert_array_equal(small.encode(sentences=TEXTS[0]), small.encode(TEXTS[0]))
    np.testing.assert_array_equal(small.encode([TEXTS[0]]), small.encode(TEXTS[0])[None])


def test_a_column_of_a_table(small: Engine) -> None:
    class Column:  # like a Series of pandas: iterable, with one dimension, and its [0] is a label
        ndim = 1

        def __iter__(self) -> Iterator[str]:
            return iter(TEXTS)

    np.testing.assert_array_equal(small.encode(Column()), small.encode(TEXTS))


def test_the_order_of_arguments_is_that_of_sentence_transformers(small: Engine, small_reference: Any) -> None:
    # inputs, prompt_name, prompt, batch_size, show_progress_bar, output_value, precision
    arguments = (list(TEXTS), "query", None, 5, False, "sentence_embedding", "ubinary")
    np.testing.assert_array_equal(small.encode(*arguments), small_reference.encode(*arguments))
    given = (list(TEXTS), None, "mine ")
    close(small.encode_query(*given), small_reference.encode_query(*given))


def test_batch_size_limits_the_texts_of_a_batch(small: Engine) -> None:
    small.encode(TEXTS, batch_size=5)
    assert small.last_stats.batches >= 3
    small.encode(TEXTS, batch_size=1)
    assert small.last_stats.batches == len(TEXTS)
    assert small.last_stats.padding == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_name": "nope"}, "prompt_name 'nope' is not among .*'document', 'other', 'query'"),
        ({"precision": "int4"}, "precision must be one of .* got 'int4'"),
        ({"output_value": "token_embeddings"}, "has no token_embeddings"),
        ({"task": "search"}, "task must be 'query', 'document' or None, got 'search'"),
        ({"device": "cuda:1"}, "'cpu', got device='cuda:1'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": -3}, "got -3"),
        ({"truncate_dim": 0}, "truncate_dim must be at least 1, got 0"),
        ({"pool": {}}, "pool"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], message: str, small: Engine) -> None:
    with pytest.raises(ValueError, match=message):
        small.encode(TEXTS, **options)
    with pytest.raises(ValueError, match=message):  # also if there is nothing to encode
        small.encode([], **options)


@pytest.mark.parametrize("options", [{"normalise_embeddings": True}, {"prompt": 7}, {"sentences": ["b"]}])
def test_wrong_arguments_raise(options: dict[str, Any], small: Engine) -> None:
    with pytest.raises(TypeError, match=r"normalise_embeddings|prompt must be a str, got int: 7|given twice"):
        small.encode(["a"], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_truncate": "explode"}, "'warn', 'error' or 'ignore', got 'explode'"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"max_batch_tokens": -5}, "max_batch_tokens must be at least 1, got -5"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine("there is no such file", **options)


def test_progress_bar(small: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    small.encode(TEXTS * 2, batch_size=2, show_progress_bar=True)
    assert "24/24" in capsys.readouterr().err
    small.encode(TEXTS)
    small.encode(TEXTS, show_progress_bar=False)
    assert capsys.readouterr().err == ""


def test_progress_bar_follows_the_logger(small: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("sbert_infer")
    logger.setLevel(logging.INFO)
    try:
        small.encode(TEXTS)
    finally:
        logger.setLevel(logging.NOTSET)
    assert "12/12" in capsys.readouterr().err
