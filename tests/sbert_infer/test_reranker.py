"""`Reranker` against the `CrossEncoder` of sentence-transformers, with real tokenizers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from transformers import AutoTokenizer

from sbert_infer import (
    ArtifactError,
    AsyncEngine,
    Encoded,
    Engine,
    EngineError,
    Reranker,
    SbertInferWarning,
    TruncationError,
)
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import append_metadata
from sbert_infer.export.exporter import export
from sbert_infer.text.pair_tokenizer import PairTokenizer
from tests.models.cross_encoders import PAIRS, cross_encoder, write_cross_encoder
from tests.models.families import MAX_LENGTH, TEXTS

QUERY = TEXTS[0]
DOCUMENTS = [*TEXTS[1:], TEXTS[3], "", " ".join(TEXTS), TEXTS[3]]  # one of them occurs three times
LONG = (" ".join(TEXTS), TEXTS[1])  # over the limit


@pytest.fixture(scope="module")
def artifact(reranker_onnx: Path) -> Path:
    """Path of a BERT with one label and prompts, token types and sigmoid."""
    return reranker_onnx


@pytest.fixture(scope="module")
def reranker(artifact: Path) -> Iterator[Reranker]:
    """A `Reranker` with that artifact."""
    with Reranker(artifact, on_truncate="ignore") as reranker:
        yield reranker


@pytest.fixture(scope="module")
def reference(reranker_checkpoint: Path) -> CrossEncoder:
    """The same checkpoint in sentence-transformers."""
    return cross_encoder(reranker_checkpoint)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Reranker, CrossEncoder]]:
    """An XLM-R with three labels, no token types and no activation, in both libraries."""
    folder = write_cross_encoder(tmp_path_factory.mktemp("classifier") / "xlm-r", "xlm-roberta", labels=3)
    export(folder, target := folder.with_suffix(".onnx"))
    with Reranker(target, on_truncate="ignore") as reranker:
        yield reranker, cross_encoder(folder)


def assert_same(found: Any, expected: Any) -> None:
    """Compare type, shape and values."""
    assert type(found) is type(expected)
    if isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
        return
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    largest = max(1.0, float(np.abs(np.asarray(expected)).max(initial=0)))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"convert_to_tensor": True},
        {"convert_to_numpy": False},
        {"activation_fn": torch.nn.Identity()},
        {"activation_fn": torch.tanh},
        {"apply_softmax": True},
        {"prompt_name": "query"},
        {"prompt": "about: "},
        {"batch_size": 3},
    ],
)
@pytest.mark.parametrize("inputs", [PAIRS, [list(PAIRS[0])], PAIRS[3], [], np.array(PAIRS[:5]), np.array(PAIRS[0])])
def test_predict(reranker: Reranker, reference: CrossEncoder, inputs: Any, options: dict[str, Any]) -> None:
    assert_same(reranker.predict(inputs, **options), reference.predict(inputs, **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"apply_softmax": True}, {"activation_fn": torch.nn.Sigmoid()}, {"convert_to_tensor": True}],
)
@pytest.mark.parametrize("inputs", [PAIRS, PAIRS[0], []])
def test_several_labels(classifier: tuple[Reranker, CrossEncoder], inputs: Any, options: dict[str, Any]) -> None:
    reranker, reference = classifier
    assert_same(reranker.predict(inputs, **options), reference.predict(inputs, **options))
    assert reranker.num_labels == reference.num_labels == len(reranker.labels)
    with pytest.raises(ValueError, match="one label, this one has 3: use predict"):
        reranker.rank(QUERY, DOCUMENTS)


def test_activations_by_name(reranker: Reranker) -> None:
    assert_same(reranker.predict(PAIRS, activation_fn="sigmoid"), reranker.predict(PAIRS))
    raw = reranker.predict(PAIRS, activation_fn="identity")
    assert_same(raw, reranker.predict(PAIRS, activation_fn=torch.nn.Identity()))
    with pytest.raises(ValueError, match="'identity', 'sigmoid' or a function of a tensor, got 'relu'"):
        reranker.predict(PAIRS, activation_fn="relu")


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 4}, {"top_k": 0}, {"return_documents": True}, {"prompt_name": "query"}]
)
@pytest.mark.parametrize("documents", [DOCUMENTS, []])
def test_rank(reranker: Reranker, reference: CrossEncoder, documents: list[str], options: dict[str, Any]) -> None:
    found, expected = (model.rank(QUERY, documents, **options) for model in (reranker, reference))
    scores = [[result.pop("score") for result in results] for results in (found, expected)]
    assert found == expected  # also the order of ties
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-5)
    assert all(type(score) is float for score in scores[0])


def test_a_score_does_not_depend_on_its_batch(reranker: Reranker) -> None:
    together = reranker.pipeline.run_together(PAIRS)
    alone = np.concatenate([reranker.pipeline.run_together([pair]) for pair in PAIRS])
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)
    assert np.ptp(alone) > 0.1


def test_batches_are_formed_by_length(reranker: Reranker) -> None:
    reranker.predict(PAIRS)
    stats = reranker.last_stats
    assert stats.texts == len(PAIRS)
    assert stats.padding < 0.1 < 1 - stats.tokens / (len(PAIRS) * MAX_LENGTH)


def test_pairs_that_are_too_long(artifact: Path, reference: CrossEncoder) -> None:
    with (
        Reranker(artifact) as warning,
        pytest.warns(
            SbertInferWarning, match=rf"1 of 2 pairs were cut to {MAX_LENGTH} tokens; see Reranker\(on_truncate=...\)"
        ),
    ):
        assert_same(warning.predict([PAIRS[0], LONG]), reference.predict([PAIRS[0], LONG]))
    with Reranker(artifact, on_truncate="error") as strict:
        with pytest.raises(TruncationError, match=f"pair 1 has more than {MAX_LENGTH} tokens"):
            strict.predict([PAIRS[0], LONG])
        strict.max_seq_length = 9
        with pytest.raises(TruncationError, match="pair 0 has more than 9 tokens"):
            strict.predict(PAIRS[0])
        with pytest.raises(ValueError, match="at least 5 for a pair of texts, got 4"):
            strict.max_seq_length = 4


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("a text", "a pair of texts or a list of pairs, got str"),
        (7, "got int"),
        ([("a", "b"), ("a", "b", "c")], r"pair 1 must be two texts, got tuple: \('a', 'b', 'c'\)"),
        (["a", "b", "c"], "pair 0 must be two texts, got list"),
        ([("a", "b"), "ab"], "pair 1 must be two texts, got str"),
        ([("a", "b"), ("a", None)], "the second text of pair 1 must be a str, got NoneType"),
        ([(1, "b")], "the first text of pair 0 must be a str, got int"),
        ([("a", "\ud800")], "the second text of pair 0 holds a lone surrogate"),
        (None, "predict needs pairs of texts"),
        ({"text": "a"}, "a pair of texts or a list of pairs, got dict"),
        ([{"text": "a"}, {"text": "b"}], "pair 0 must be two texts, got dict"),
        ([("a", {"text": "b"})], "the second text of pair 0 must be a str, got dict"),
    ],
)
def test_what_is_not_a_pair(reranker: Reranker, inputs: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        reranker.predict(inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((QUERY, "a text"), "documents must be a list of texts, got one str"),
        ((QUERY, ["a", 2]), "document 1 must be a str, got int"),
        ((None, ["a"]), "the query must be a str, got NoneType"),
        ((QUERY, ["a"], -1), "top_k must be at least 0, got -1"),
    ],
)
def test_what_can_not_be_ranked(reranker: Reranker, arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        reranker.rank(*arguments)


@pytest.mark.parametrize(
    ("kind", "opens", "message"),
    [
        ("reranker", Engine, "is a reranker: open it with Reranker, not with Engine"),
        ("encoder", Reranker, "is a sentence encoder: open it with Engine, not with Reranker"),
        ("painter", Reranker, "is a painter, which this sbert-infer does not know: upgrade sbert-infer"),
    ],
)
def test_the_wrong_class_names_the_right_one(
    artifact: Path, tmp_path: Path, kind: str, opens: Callable[[Path], object], message: str
) -> None:
    opened = open_artifact(artifact)
    other = tmp_path / "other.onnx"
    with other.open("w+b") as file:
        append_metadata(file, replace(opened.manifest, kind=kind), opened.tokenizer_json)
    with pytest.raises(ArtifactError, match=message):
        opens(other)


def test_an_evaluator_of_sentence_transformers(reranker: Reranker, reference: CrossEncoder) -> None:
    samples = [{"query": QUERY, "positive": [text], "negative": list(TEXTS[4:])} for text in TEXTS[1:4]]
    evaluator = CrossEncoderRerankingEvaluator(samples, name="x", show_progress_bar=False, write_csv=False)
    assert evaluator(reranker) == pytest.approx(evaluator(reference))


async def _predict_together(engine: AsyncEngine, calls: list[list[tuple[str, str]]]) -> list[Encoded]:
    return await asyncio.gather(*(engine.predict_counted(pairs, on_truncate="ignore") for pairs in calls))


def test_many_callers(artifact: Path, reranker: Reranker) -> None:
    calls = [PAIRS, PAIRS[:1], [], PAIRS[::-1], [PAIRS[2]] * 3]

    async def run() -> list[Encoded]:
        async with AsyncEngine(artifact) as engine:
            with pytest.raises(EngineError, match="bert is a reranker: use predict_counted"):
                await engine.encode("a text")
            with pytest.raises(TruncationError, match="pair 1 has more than"):
                await engine.predict_counted([PAIRS[0], LONG], on_truncate="error")
            return await _predict_together(engine, calls)

    for pairs, encoded in zip(calls, asyncio.run(run()), strict=True):
        assert encoded.vectors.shape == (len(pairs), 1)
        expected = reranker.predict(pairs, activation_fn="identity")
        np.testing.assert_allclose(encoded.vectors[:, 0], expected, rtol=0, atol=1e-5)


def test_close(artifact: Path) -> None:
    reranker = Reranker(artifact)
    assert repr(reranker).startswith("Reranker(")
    reranker.close()
    reranker.close()
    with pytest.raises(Exception, match="closed"):
        reranker.predict(PAIRS)


# --------------------------------------------------------------------------------------------------
# Tokens

LIMIT = 16  # tokens
WORDS = st.text("ab cé漢🙂", max_size=12)
# Texts a little or far over the limit, but not both far: transformers would take seconds.
SIZES = st.one_of(st.tuples(st.integers(0, 3), st.integers(0, 60)), st.tuples(st.integers(0, 12), st.integers(0, 12)))


@st.composite
def pairs_of_texts(draw: st.DrawFn) -> tuple[str, str]:
    """Draw two texts of any lengths, in either order."""
    few, many = draw(SIZES)
    pair = (draw(WORDS) * few, draw(WORDS) * many)
    return pair if draw(st.booleans()) else pair[::-1]


@pytest.fixture(scope="module", params=["bert-right", "bert-left", "roberta-right", "xlm-roberta-left"])
def tokenizers(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> tuple[PairTokenizer, Any]:
    """Our tokenizer, and that of transformers."""
    family, _, side = request.param.rpartition("-")
    folder = make_checkpoint(family)
    reference = AutoTokenizer.from_pretrained(folder, model_max_length=LIMIT, truncation_side=side)
    content = json.loads(reference.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return PairTokenizer(json.dumps(content), LIMIT, side, token_types=family == "bert"), reference


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(pairs_of_texts(), min_size=1, max_size=3))
def test_pairs_are_tokenized_and_cut_as_by_transformers(
    tokenizers: tuple[PairTokenizer, Any], pairs: list[tuple[str, str]]
) -> None:
    ours, reference = tokenizers
    first, second = map(list, zip(*pairs, strict=True))
    expected = reference(first, second, padding=True, truncation="longest_first", return_tensors="np")
    tokenized = ours(pairs)
    width = expected["input_ids"].shape[1]
    ids, mask, types = tokenized.padded(np.arange(len(pairs)), width, reference.pad_token_id, "right")
    np.testing.assert_array_equal(ids, expected["input_ids"])
    np.testing.assert_array_equal(mask, expected["attention_mask"])
    wanted = expected.get("token_type_ids", 0) * expected["attention_mask"]
    np.testing.assert_array_equal(np.zeros_like(ids) if types is None else types, wanted)
    whole = [len(row) for row in reference(first, second)["input_ids"]]
    assert tokenized.truncated.tolist() == [length > LIMIT for length in whole]


class WholeTexts(PairTokenizer):
    """Like `PairTokenizer`, but always tokenizes whole texts."""

    def _prefix(self, text: str) -> str:
        return text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.tuples(WORDS, WORDS), many=st.tuples(st.integers(0, 600), st.integers(0, 600)))
@example(words=("a b ", "a b "), many=(400, 500))  # one more token is kept of the longer text
@example(words=("a b ", "a b "), many=(500, 400))
@example(words=("a b ", "a b "), many=(3, 400))
def test_a_long_text_may_be_cut_before_it_is_tokenized(
    tokenizers: tuple[PairTokenizer, Any], words: tuple[str, str], many: tuple[int, int]
) -> None:
    ours, _ = tokenizers
    side = "right" if ours._can_cut else "left"
    whole = WholeTexts(ours.backend.to_str(), LIMIT, side, token_types=ours._token_types)
    pair = (words[0] * many[0], words[1] * many[1])
    found, expected = ours([pair]), whole([pair])
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.truncated, expected.truncated)


def test_two_long_texts_take_no_more_memory_than_one(reranker: Reranker) -> None:
    """`tokenizers` alone would make a million combinations of the pieces that it cuts off."""
    tokenizer = reranker.pipeline.tokenizer
    tokenized = tokenizer([(" ".join(TEXTS) * 100, " ".join(TEXTS) * 101)])
    assert tokenized.lengths.tolist() == [MAX_LENGTH]
    assert tokenized.truncated.all()
