"""Calls as sentence-transformers makes and takes them: what `encode` gets, what it may return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SparseEncoder

from sbert_infer import Engine, Reranker, SbertInferWarning
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families import family
from tests.models.checkpoints import TEXTS
from tests.models.sparse_encoders import splade_checkpoint, splade_onnx

PROMPTS = {"query": "find: ", "passage": "text: "}


@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        ("encode_query", {}, "query"),
        ("encode_query", {"prompt": "see: "}, None),
        ("encode_query", {"prompt": "see: ", "prompt_name": "passage"}, "passage"),
        ("encode_document", {}, "passage"),
        ("encode_document", {"prompt": "see: "}, None),
    ],
)
def test_what_replaces_encode_gets_everything_by_name(
    method: str, arguments: dict[str, str], name: str | None, small: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(small, "encode", lambda **given: calls.append(given))
    monkeypatch.setattr(small, "prompts", PROMPTS)
    getattr(small, method)(sentences=["a"], batch_size=3, **arguments)
    task = method.removeprefix("encode_")
    expected = {"inputs": ["a"], "prompt_name": name, "prompt": arguments.get("prompt"), "task": task, "batch_size": 3}
    assert calls == [expected]


def test_encode_query_takes_arguments_in_the_order_of_encode(small: Engine) -> None:
    call: Any = small.encode_query
    found = call(TEXTS, None, None, 3, False, "sentence_embedding", "float32", True, False, None, True)
    np.testing.assert_allclose(found, small.encode_query(TEXTS, normalize_embeddings=True), rtol=0, atol=1e-6)
    with pytest.raises(TypeError, match="at most 14 positional"):
        call(TEXTS, *[None] * 14)


@pytest.mark.parametrize("inputs", ["a text", ["a text", "a much longer text than that"], []])
def test_all_features(inputs: Any, engine: Engine, minilm: Any) -> None:
    found = engine.encode(inputs, prompt="see: ", output_value=None, truncate_dim=64, normalize_embeddings=True)
    expected = minilm.encode(inputs, prompt="see: ", output_value=None, truncate_dim=64)
    assert type(found) is type(expected)
    for ours, theirs in zip(*(each if isinstance(inputs, list) else [each] for each in (found, expected)), strict=True):
        length = len(ours["input_ids"])
        assert theirs["attention_mask"].sum() == length == ours["attention_mask"].sum()
        assert torch.equal(ours["input_ids"], theirs["input_ids"][:length])
        torch.testing.assert_close(ours["sentence_embedding"], theirs["sentence_embedding"], rtol=0, atol=1e-5)
        assert (ours["modality"], ours["prompt_length"]) == (theirs["modality"], theirs["prompt_length"])


def test_all_features_with_tokens(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "probe_texts", lambda *_: list(TEXTS))
        export(make_checkpoint("bert"), tmp_path / "tokens.onnx", ExportOptions(outputs=("sentence", "tokens")))
    with Engine(tmp_path / "tokens.onnx", on_truncate="ignore") as engine:
        found = engine.encode(TEXTS[:2], output_value=None)
        for each, tokens in zip(found, engine.encode(TEXTS[:2], output_value="token_embeddings"), strict=True):
            assert len(each["input_ids"]) == len(tokens)
            np.testing.assert_array_equal(each["token_embeddings"], tokens)


def test_single_inputs(small: Engine, reranker_onnx: Path) -> None:
    assert small.is_singular_input("a text")
    assert not small.is_singular_input(["a text"])
    assert not small.is_singular_input(np.array(["a", "b"]))
    for text in (np.array("a text"), np.str_("a text"), np.array("a text", object)):
        assert small.is_singular_input(text)
        np.testing.assert_array_equal(small.encode(text), small.encode("a text"))
    assert small.is_singular_input({"text": "a text"})
    assert not small.is_singular_input([{"text": "a text"}])
    with Reranker(reranker_onnx) as reranker:
        assert reranker.is_singular_input(("a", "b"))
        assert not reranker.is_singular_input([("a", "b")])
    with pytest.raises(TypeError, match="encode needs a str"):
        small.is_singular_input(b"bytes")
    with pytest.raises(TypeError, match="encode needs a str or an iterable of str in order, got int"):
        small.encode(np.array(3))


def test_texts_by_name(small: Engine, small_reference: Any) -> None:
    """`{"text": "..."}` is a text, as where inputs may have images as well."""
    named: Any = [{"text": text} for text in TEXTS]
    expected = small.encode(TEXTS)
    for inputs in (named, tuple(named), iter(named), np.array(named)):
        np.testing.assert_array_equal(small.encode(inputs), expected)
    np.testing.assert_allclose(small_reference.encode(named), expected, atol=1e-5)
    assert small.encode(named[0]).shape == small.encode(TEXTS[0]).shape
    assert torch.equal(small.preprocess(named)["input_ids"], small.preprocess(TEXTS)["input_ids"])


def test_a_prompt_and_a_prompt_name(small: Engine, reranker_onnx: Path) -> None:
    """The prompt wins with a warning, where sentence-transformers has a line of the log."""
    both: Any = {"prompt": "see: ", "prompt_name": "query"}
    expected = small.encode("a text", prompt="see: ")
    with pytest.warns(SbertInferWarning, match="prompt_name 'query' has no effect"):
        np.testing.assert_array_equal(small.encode("a text", **both), expected)
    with Reranker(reranker_onnx) as reranker, pytest.warns(SbertInferWarning, match="prompt_name 'query' has no"):
        reranker.predict(("a", "b"), **both)


def test_only_vectors_are_decoded(once: Callable[..., Path]) -> None:
    numbers: Any = [1, 2, 3]
    with Engine(splade_onnx(once)) as engine, pytest.raises(TypeError, match="sparse encoder are needed, got int"):
        engine.decode(numbers)
    with pytest.raises(TypeError):
        SparseEncoder(str(splade_checkpoint(once)), device="cpu").decode(numbers)
