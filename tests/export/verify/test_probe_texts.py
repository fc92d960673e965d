"""The texts that a model is probed with really have every length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.export.verify.probe_texts import BESIDES, ODD, SENTENCES, is_odd, lengths_to_probe, probe_texts

MakeCheckpoint = Callable[..., Path]


def counter(tokenizer: tokenizers.Tokenizer) -> Callable[[Sequence[str]], list[int]]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]


def assert_every_length(count: Callable[[Sequence[str]], list[int]], limit: int) -> None:
    texts = probe_texts(count, limit)
    lengths = lengths_to_probe(count(["a"])[0], limit)
    found = count(texts)
    assert found[: len(lengths)] == lengths
    assert found[len(lengths)] > limit  # one that is cut
    assert {*ODD, *BESIDES, *SENTENCES} <= set(texts)
    assert not any(map(is_odd, [*BESIDES, *SENTENCES]))
    assert len(set(texts)) > 0.9 * len(texts)


@pytest.mark.parametrize("limit", [3, 5, 64, 301])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "albert"])  # WordPiece, BPE, Unigram twice
def test_every_length(family: str, limit: int, make_checkpoint: MakeCheckpoint) -> None:
    count = counter(tokenizers.Tokenizer.from_file(str(make_checkpoint(family) / "tokenizer.json")))
    assert_every_length(count, limit)


@pytest.mark.parametrize("limit", [256, 512])
def test_every_length_of_minilm(limit: int, minilm_path: Path) -> None:
    assert_every_length(counter(tokenizers.Tokenizer.from_file(str(minilm_path / "tokenizer.json"))), limit)


@given(shortest=st.integers(1, 5), longest=st.integers(3, 40_000))
def test_lengths(shortest: int, longest: int) -> None:
    lengths = lengths_to_probe(shortest, longest)
    assert lengths == sorted(set(lengths))
    assert len(lengths) <= 100
    if shortest <= longest:
        assert lengths[0] == shortest
        assert lengths[-1] == longest
        assert set(range(shortest, min(longest, 64) + 1)) <= set(lengths)
        for edge in (32, 96, 128, 256, 384, 512):  # where kernels change, on both sides
            beside = {edge - 1, edge, edge + 1}
            assert {length for length in beside if shortest <= length <= longest} <= set(lengths)
        assert all(b <= 2 * a for a, b in pairwise(length for length in lengths if 64 <= length <= 8192))
