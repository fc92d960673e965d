"""Pooling of packed rows gives what pooling gives for each text by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sbert_infer.export.checkpoint.modules import PoolingSpec
from sbert_infer.export.reference.packed import count_before, pool
from sbert_infer.export.reference.pooling import Pooling

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
WIDTH, LONGEST = 5, 16

# Each row is a list of texts: tokens, and how many are the prompt's, which may be cut with them.
texts = st.tuples(st.integers(1, LONGEST), st.integers(0, LONGEST))
all_rows = st.lists(st.lists(texts, max_size=5), min_size=1, max_size=3).filter(any)


def packed(rows: list[list[tuple[int, int]]], length: int) -> dict[str, Tensor]:
    """The inputs of `pool` for these rows, except the tokens."""
    segments = max(map(len, rows))
    ids, positions = torch.zeros(2, len(rows), length, dtype=torch.int64)
    starts, ends = torch.zeros(2, len(rows), segments, dtype=torch.int64)
    for row, members in enumerate(rows):
        end = 0
        for number, (tokens, prompt) in enumerate(members):
            start, end = end, end + tokens
            ids[row, start:end], positions[row, start:end] = number + 1, torch.arange(tokens)
            starts[row, number], ends[row, number] = min(start + prompt, end), end
    return {"segment_ids": ids, "position_ids": positions, "starts": starts, "ends": ends}


@given(all_rows, st.integers(0, 3), st.integers(0, 1000))
def test_every_mode(rows: list[list[tuple[int, int]]], gap: int, seed: int) -> None:
    length = max(sum(tokens for tokens, _ in members) for members in rows) + gap
    tokens = torch.randn(len(rows), length, WIDTH, generator=torch.Generator().manual_seed(seed)) - 3  # so 0 is no max
    pooled = pool(MODES, tokens, **packed(rows, length), longest=LONGEST)
    alone = Pooling(PoolingSpec(WIDTH, MODES, include_prompt=False))
    for row, members in enumerate(rows):
        start = 0
        for number, (count, prompt) in enumerate(members):
            text = tokens[row : row + 1, start : start + count]
            expected = alone(text, torch.ones(1, count, dtype=torch.int64), torch.tensor(prompt))[0]
            torch.testing.assert_close(pooled[row, number], expected, rtol=0, atol=3e-5)
            start += count
        assert not pooled[row, len(members) :].any()  # of segments that do not exist


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_long_texts_in_16_bits(dtype: torch.dtype, mode: str) -> None:
    """Nothing overflows or vanishes, and what is lost is the last bit of the result."""
    count = 8192
    tokens = (torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(0)) + 100).to(dtype)
    inputs = packed([[(count - 3, 10), (3, 0)]], count)
    found = pool((mode,), tokens, **inputs, longest=count)
    exact = pool((mode,), tokens.double(), **inputs, longest=count)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.float(), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_a_text_without_tokens_gives_zeros() -> None:
    """An empty one of a model without special tokens; not a vector of the text before it."""
    pooled = pool(MODES, torch.ones(1, 6, WIDTH), **packed([[(4, 0), (0, 0), (2, 0)]], 6), longest=LONGEST)
    assert not pooled[0, 1].any()
    assert pooled[0, 0].all()
    assert pooled[0, 2].all()


@given(all_rows, st.integers(0, 3), st.integers(0, 1000))
def test_marked_tokens_are_counted_within_their_text(rows: list[list[tuple[int, int]]], gap: int, seed: int) -> None:
    length = max(sum(tokens for tokens, _ in members) for members in rows) + gap
    marked = torch.rand(len(rows), length, generator=torch.Generator().manual_seed(seed)) < 0.3
    found = count_before(marked, packed(rows, length)["position_ids"])
    for row, members in enumerate(rows):
        start = 0
        for count, _ in members:
            expected = [int(marked[row, start : start + place].sum()) for place in range(count)]
            assert found[row, start : start + count].tolist() == expected
            start += count
        assert not found[row, start:].any()  # where nothing is
