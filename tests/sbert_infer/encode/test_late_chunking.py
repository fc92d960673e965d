"""Late chunking: spans have the mean of their token vectors in the whole document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer import Engine
from sbert_infer.encode import late_chunking
from sbert_infer.encode.late_chunking import check_can_pool, token_windows
from sbert_infer.export.exporter import ExportOptions, export
from sbert_infer.export.families import family
from sbert_infer.export.families.sentence import SentenceEncoder
from tests.models.checkpoints import ODD_TEXTS, TEXTS
from tests.models.graphs import Array, assert_close
from tests.models.multi_vectors import one_thread

LIMIT = 64  # tokens, set for the real model, so that a short text is a long document
DOCUMENT = "Berlin is the capital of Germany. Its population is 3.7 million.  The city lies on the Spree, naïvely said."
SENTENCES = [(0, 33), (34, 65), (67, len(DOCUMENT))]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def export_tokens(once: Callable[..., Path]) -> Callable[..., Path]:
    """Return `export_tokens(key, checkpoint)`, which exports an artifact with token vectors.

    Its parity is checked by other tests.
    """

    def make(key: str, checkpoint: Path, **options: Any) -> Path:
        def write(target: Path) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(family, "probe_texts", lambda *_: list(TEXTS))
                export(checkpoint, target, ExportOptions(outputs=("sentence", "tokens"), **options))

        return once(f"tokens of {key}", "tokens.onnx", write)

    return make


@pytest.fixture(scope="module")
def minilm_tokens(minilm_path: Path, export_tokens: Callable[..., Path]) -> Path:
    """Path of the artifact of the real MiniLM."""
    return export_tokens("minilm", minilm_path, max_length=LIMIT)


@pytest.fixture(scope="module")
def small_tokens(make_checkpoint: Callable[..., Path], export_tokens: Callable[..., Path]) -> Path:
    """Path of a small model that leaves out prompts; tokens include the space before a word."""
    prompts = {"document": "a text about "}
    checkpoint = make_checkpoint("modernbert", normalize=False, include_prompt=False, prompts=prompts)
    return export_tokens("modernbert", checkpoint)


@pytest.fixture(scope="module")
def real(minilm_tokens: Path) -> Iterator[Engine]:
    with Engine(minilm_tokens) as engine:
        yield engine


@pytest.fixture(scope="module")
def eager(minilm_path: Path) -> tuple[Any, Any]:
    """The tokenizer and the model in transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_path)
    return tokenizer, transformers.AutoModel.from_pretrained(minilm_path).eval()


def unit(x: Array) -> Array:
    result: Array = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return result


@torch.inference_mode()
def token_vectors(eager: tuple[Any, Any], ids: list[int]) -> Array:
    vectors: Array = eager[1](input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
    return vectors


def test_spans_are_means_of_their_tokens(real: Engine, eager: tuple[Any, Any]) -> None:
    encoding = eager[0](DOCUMENT, return_offsets_mapping=True)
    vectors = token_vectors(eager, encoding["input_ids"])
    starts = [start for start, _ in encoding["offset_mapping"][1:-1]]
    expected = []
    for first, last in SENTENCES:
        rows = [row for row, start in enumerate(starts, 1) if first <= start < last]
        rows = [0] * (first == 0) + rows + [len(vectors) - 1] * (last == len(DOCUMENT))  # [CLS] and [SEP]
        expected.append(vectors[rows].mean(axis=0))
    found = real.encode_spans(DOCUMENT, SENTENCES)
    assert found.dtype == np.float32
    assert_close(found, unit(np.stack(expected)), 1e-5)
    alone = real.encode([DOCUMENT[first:last] for first, last in SENTENCES])
    assert (np.abs(found - alone).max(axis=1) > 0.01).all()  # the context changes the vectors


@pytest.mark.parametrize("text", [DOCUMENT, *(text for text in ODD_TEXTS[:-1] if text.strip()), "[CLS] a [SEP] b"])
def test_one_span_over_everything(real: Engine, text: str) -> None:
    assert_close(real.encode_spans(text, [(0, len(text))])[0], real.encode(text), 1e-6)


def test_a_long_document_runs_in_windows(real: Engine, eager: tuple[Any, Any]) -> None:
    """Each token's vector comes from the window with the most context, computed here one by one."""
    sentences = [*TEXTS, *TEXTS[::-1]]
    document = " ".join(sentences)
    ends = np.cumsum([len(sentence) + 1 for sentence in sentences]) - 1
    spans = [(int(end) - len(sentence), int(end)) for sentence, end in zip(sentences, ends, strict=True)]
    encoding = eager[0](document, add_special_tokens=False, return_offsets_mapping=True)
    ids, most = encoding["input_ids"], LIMIT - 2
    assert len(ids) > 3 * LIMIT
    windows = token_windows(len(ids), most)
    runs = [token_vectors(eager, [101, *ids[window.start : window.stop], 102]) for window in windows]
    body = np.empty((len(ids), runs[0].shape[1]), np.float32)
    for token in range(len(ids)):
        context = [min(token - window.start, window.stop - 1 - token) for window in windows]
        best = next(i for i, w in enumerate(windows) if w.first <= token < w.last)
        at_edge = token < most // 2 or token >= len(ids) - most // 2
        assert at_edge or context[best] >= max(context) - 1
        body[token] = runs[best][1 + token - windows[best].start]
    starts = [start for start, _ in encoding["offset_mapping"]]
    expected = [body[[first <= start < last for start in starts]] for first, last in spans]
    expected[0] = np.concatenate([runs[0][:1], expected[0]])
    expected[-1] = np.concatenate([expected[-1], runs[-1][-1:]])
    found = real.encode_spans(document, spans)
    assert_close(found, unit(np.stack([vectors.mean(axis=0) for vectors in expected])), 1e-5)


@pytest.mark.parametrize("most", [2**16, 1])
def test_many_documents(real: Engine, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_chunking, "_MAX_TOKENS", most)
    documents = [DOCUMENT, TEXTS[0], " ".join(TEXTS)]
    spans = [SENTENCES, [(0, 12), (2, len(TEXTS[0]))], [(0, 1), (5, 400), (100, 200)]]
    found = real.encode_spans(documents, spans, normalize_embeddings=True, truncate_dim=100)
    assert [vectors.shape for vectors in found] == [(3, 100), (2, 100), (3, 100)]
    for document, its, vectors in zip(documents, spans, found, strict=True):
        assert_close(vectors, unit(real.encode_spans(document, its)[:, :100]), 1e-6)
    assert real.encode_spans([], []) == []
    assert real.encode_spans(DOCUMENT, []).shape == (0, 384)


def test_words_behind_a_space(small_tokens: Path) -> None:
    """A token that includes the space before a word still belongs to the word's span."""
    text = TEXTS[0]
    spaces = [-1, *(place for place, character in enumerate(text) if character == " "), len(text)]
    words = [(before + 1, after) for before, after in pairwise(spaces)]
    with Engine(small_tokens) as engine:
        found = engine.encode_spans(text, words)
        tokens = engine.encode(text, output_value="token_embeddings")
        offsets = engine.tokenizer(text, truncation=True, return_offsets_mapping=True)["offset_mapping"]
    assert any(start != end and text[start] == " " for start, end in offsets)
    for (first, last), vector in zip(words[1:-1], found[1:-1], strict=True):
        own = [row for row, (_, end) in enumerate(offsets) if first < end <= last]
        assert_close(vector, tokens[own].mean(axis=0), 1e-5)


@pytest.mark.parametrize("counts", [True, False])
def test_prompts(small_tokens: Path, minilm_tokens: Path, counts: bool) -> None:
    """A prompt belongs to the first character if it counts, and precedes every window."""
    prompt, long = "a text about ", " ".join(TEXTS)
    with Engine(minilm_tokens if counts else small_tokens, on_truncate="ignore") as engine:
        assert engine.manifest.include_prompt == counts
        for text in (TEXTS[0], TEXTS[4]):
            whole = engine.encode_spans(text, [(0, len(text))], prompt=prompt)[0]
            assert_close(whole, engine.encode(text, prompt=prompt), 1e-6)
            assert np.abs(whole - engine.encode_spans(text, [(0, len(text))])[0]).max() > 1e-3
        last = [(len(long) - 12, len(long))]
        assert np.abs(engine.encode_spans(long, last, prompt=prompt) - engine.encode_spans(long, last)).max() > 1e-3
        with pytest.raises(ValueError, match="the prompt leaves no room"):
            engine.encode_spans("short", [(0, 5)], prompt=long)


@pytest.mark.parametrize(
    ("spans", "error", "message"),
    [
        ([(0, 4), (5, 5)], ValueError, r"document 0: no span \(5, 5\) in a text of 11 characters"),
        ([(0, 12)], ValueError, r"no span \(0, 12\)"),
        ([(-1, 2)], ValueError, r"no span \(-1, 2\)"),
        ([(5, 7)], ValueError, r"no token begins in the span \(5, 7\)"),
        ([(9, 11)], ValueError, r"no token begins in the span \(9, 11\)"),  # only the special token at the end
        ([3, 4], TypeError, "a span must be two int"),
        ([(0, 1, 2)], TypeError, "a span must be two int"),
        ([(0.0, 3.0)], TypeError, "a span must be two int"),
    ],
)
def test_bad_spans(real: Engine, spans: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        real.encode_spans("a dog   .  ", spans)


def test_what_cannot_be_pooled(real: Engine, make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="has no token_embeddings: export it with --outputs sentence,tokens"):
        check_can_pool(replace(real.manifest, outputs=("sentence_embedding",)))
    with pytest.raises(ValueError, match="has cls\\+mean pooling: spans need mean pooling"):
        check_can_pool(replace(real.manifest, pooling=("cls", "mean")))
    folder = make_checkpoint(dense=({"out_features": 32},), layer_norm=True)
    encoder = SentenceEncoder.read(folder, ExportOptions(outputs=("sentence", "tokens")))
    encoder.load()
    encoder.prepare()
    with pytest.raises(ValueError, match="has Dense, LayerNorm behind its pooling, in the graph"):
        check_can_pool(encoder.draft)
    with pytest.raises(ValueError, match="1 documents, but spans of 2"):
        real.encode_spans(["a"], [[(0, 1)], [(0, 1)]])


@given(st.integers(0, 3000), st.integers(1, 300))
def test_windows(tokens: int, most: int) -> None:
    windows = token_windows(tokens, most)
    assert [window.first for window in windows] == [0, *(window.last for window in windows[:-1])]
    assert windows[-1].last == tokens
    assert all(w.start <= w.first <= w.last <= w.stop <= tokens for w in windows)
    assert all(w.stop - w.start == min(tokens, most) for w in windows)
    for before, after in pairwise(windows):
        assert before.stop - after.start >= most // 4
        assert before.first < before.last
