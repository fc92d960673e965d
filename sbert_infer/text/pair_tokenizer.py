"""Tokenizing pairs of texts, with the special tokens around and between them.

The texts are tokenized one by one and joined here. `tokenizers` can tokenize pairs itself, but when
it truncates a pair it also returns every combination of the pieces that it cut off: two texts of
200 KB would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from sbert_infer.text.tokenizer import LONG, TokenizedTexts, Tokenizer
from sbert_infer.types import Pair, Text

_SAMPLES = ("a", "1", "the", "。")  # the first that has a token shows where special tokens go


class PairTokenizer(Tokenizer):
    """Tokenizes pairs to at most `max_length` tokens, special ones included.

    The longer text of a pair is cut first.
    """

    def __init__(
        self, tokenizer_json: str, max_length: int, truncation_side: str = "right", *, token_types: bool = False
    ) -> None:
        """Load the tokenizer; with `token_types`, mark the tokens of the second text of a pair."""
        super().__init__(tokenizer_json, max_length, truncation_side)
        self._token_types = token_types
        self._room = max_length - self.backend.num_special_tokens_to_add(True)
        self.backend.no_truncation()
        self._frame = next(filter(None, map(self._frame_of, _SAMPLES)))
        self.backend.enable_truncation(max_length, direction=truncation_side)

    def __call__(self, texts: Sequence[Text]) -> TokenizedTexts:
        """Tokenize pairs; those over the limit are cut and marked as truncated."""
        pairs = [self._shorter(text) for text in texts if not isinstance(text, str)]
        if len(pairs) < len(texts):  # single texts, such as the workers' probe
            return super().__call__(texts)
        tokens = self._tokens_of(list(dict.fromkeys(chain.from_iterable(pairs))))
        rows = [self._joined(tokens[first], tokens[second]) for first, second in pairs]
        lengths = np.fromiter((len(row.ids) for row in rows), np.int64, len(rows))
        total = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(row.ids for row in rows), np.int64, total)
        types = np.fromiter(chain.from_iterable(row.types for row in rows), np.int64, total)
        truncated = np.fromiter((row.truncated for row in rows), np.bool_, len(rows))
        starts = np.cumsum(lengths) - lengths
        return TokenizedTexts(ids, starts, lengths, truncated, types if self._token_types else None)

    def _tokens_of(self, texts: list[str]) -> dict[str, _Tokens]:
        """Return the tokens of each text, as many as may be kept, and their full number.

        Special tokens are not included.
        """
        encodings = self._encodings(texts, add_special_tokens=False)
        counts = [len(encoding) + sum(map(len, encoding.overflowing)) for encoding in encodings]
        return {
            text: _Tokens(encoding.ids, count) for text, encoding, count in zip(texts, encodings, counts, strict=True)
        }

    def _joined(self, *texts: _Tokens) -> _Row:
        first, second = keep(texts[0].total, texts[1].total, self._room)
        parts = [
            text.ids[:count] if self._can_cut else text.ids[len(text.ids) - count :]
            for text, count in zip(texts, (first, second), strict=True)
        ]
        before, between, after = self._frame.special
        ids = [*before.ids, *parts[0], *between.ids, *parts[1], *after.ids]
        type_first, type_second = ([type] * len(part) for type, part in zip(self._frame.types, parts, strict=True))
        types = [*before.types, *type_first, *between.types, *type_second, *after.types]
        return _Row(ids, types, first + second < texts[0].total + texts[1].total)

    def _shorter(self, pair: Pair) -> Pair:
        """Return a pair, with a long text cut to a prefix, that gives the same tokens.

        A long text may be cut only if the other text fits the limit by itself. If neither does, the
        number of tokens kept of each depends on which of them is longer.
        """
        first, second = pair
        if len(second) > LONG * self.max_length and self._fits(first):
            return first, self._prefix(second)
        if len(first) > LONG * self.max_length and self._fits(second):
            return self._prefix(first), second
        return pair

    def _fits(self, text: str) -> bool:
        return len(text) <= LONG * self.max_length and not self.backend.encode(text).overflowing

    def _frame_of(self, sample: str) -> _Frame | None:
        """Return the special tokens around a pair of `sample` texts; None if it has no tokens."""
        encoding = self.backend.encode(sample, sample)
        owners = encoding.sequence_ids  # 0 or 1; None for special tokens
        if 0 not in owners or 1 not in owners:
            return None
        starts, ends = [owners.index(text) for text in (0, 1)], [_after_last(owners, text) for text in (0, 1)]
        spans = [(0, starts[0]), (ends[0], starts[1]), (ends[1], len(owners))]
        special = [_Row(encoding.ids[start:end], encoding.type_ids[start:end]) for start, end in spans]
        return _Frame(special, [encoding.type_ids[start] for start in starts])


class _Tokens(NamedTuple):
    ids: list[int]
    total: int


class _Row(NamedTuple):
    ids: list[int]
    types: list[int]
    truncated: bool = False


class _Frame(NamedTuple):
    special: list[_Row]  # special tokens before, between and after the texts
    types: list[int]  # token type of each text


def keep(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each text fit into `room`; the longer text is cut first.

    >>> keep(3, 20, 10), keep(9, 8, 11), keep(2, 3, 10)
    ((3, 7), (6, 5), (2, 3))
    """
    if first + second <= room:
        return first, second
    short = min(first, second, room // 2)
    return (short, room - short) if first <= second else (room - short, short)


def _after_last(owners: list[int | None], text: int) -> int:
    return len(owners) - owners[::-1].index(text)
