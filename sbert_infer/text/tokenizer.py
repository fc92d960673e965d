"""Tokenizing texts with the model's own limits, not those that `tokenizer.json` may contain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import cast

import numpy as np
import numpy.typing as npt
import tokenizers

from sbert_infer.text.packing import PackedRows
from sbert_infer.types import Text

Ids = npt.NDArray[np.int64]

# Characters per allowed token: a text with more than LONG is cut to a prefix of _PREFIX before it
# is tokenized. That is still several times the characters of a token in ordinary text.
LONG, _PREFIX = 16, 8
_MARGIN = 256  # characters
# The tokenizer holds the GIL while it encodes a single text, but not while it encodes a batch. Only
# texts up to this many characters are encoded singly, as a long one would block all other threads.
_SHORT = 1000
_ZERO = np.zeros(1, np.int64)


@dataclass(frozen=True)
class TokenizedTexts:
    """Token ids of many texts: those of text `i` are `ids[starts[i] : starts[i] + lengths[i]]`."""

    ids: Ids
    starts: Ids
    lengths: Ids
    truncated: npt.NDArray[np.bool_]
    types: Ids | None = None  # for each id, 1 in the second text of a pair; None if not needed
    attended: Ids | None = None  # leading tokens of each text that are attended to; None for all

    def span(self, row: int) -> tuple[int, int]:
        """Return the start and end offset (exclusive) of a text's ids."""
        start = int(self.starts[row])
        return start, start + int(self.lengths[row])

    def tokens(self, rows: Ids | None = None) -> int:
        """Return the number of tokens of all texts, or of some rows."""
        return len(self.ids) if rows is None else int(self.lengths[rows].sum())

    def cut(self, rows: Ids | None = None) -> int:
        """Return how many texts were truncated, of all texts or of some rows."""
        return int(np.count_nonzero(self.truncated if rows is None else self.truncated[rows]))

    def padded(self, rows: Ids, length: int, pad_id: int, padding_side: str) -> tuple[Ids, Ids, Ids | None]:
        """Return token ids, attention mask and token types (or None), each [rows, length]."""
        position = np.arange(length)[None, :]
        lengths = self.lengths[rows, None]  # [rows, 1]
        if padding_side == "left":
            position = position - (length - lengths)
        own = (position >= 0) & (position < lengths)  # [rows, length]
        mask = own if self.attended is None else own & (position < self.attended[rows, None])
        where = np.where(own, self.starts[rows, None] + position, 0)
        ids = self.ids if len(self.ids) else np.zeros(1, np.int64)  # if every text is empty, there are no ids
        types = None if self.types is None else np.where(own, self.types[where], 0)
        return np.where(own, ids[where], pad_id), mask.astype(np.int64), types

    def packed(self, rows: PackedRows, pad_id: int) -> tuple[Ids, Ids, Ids]:
        """Return token ids, numbers of segments and positions, each [rows, length] of the shape.

        Segments are numbered from 1 in each row, 0 where nothing is; positions count from 0 in each
        text.
        """
        shape, lengths = rows.shape, self.lengths[rows.texts]
        before = np.cumsum(lengths) - lengths
        position = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
        place = np.repeat(rows.rows * shape.length + rows.columns, lengths) + position
        ids, segments, positions = np.full(shape.tokens, pad_id), *np.zeros((2, shape.tokens), np.int64)
        ids[place] = self.ids[np.repeat(self.starts[rows.texts], lengths) + position]
        segments[place] = np.repeat(rows.segments + 1, lengths)
        positions[place] = position
        size = (shape.rows, shape.length)
        return ids.reshape(size), segments.reshape(size), positions.reshape(size)

    @classmethod
    def joined(cls, parts: Iterable[tuple[TokenizedTexts, Ids]]) -> TokenizedTexts:
        """Join the given rows of several objects into one."""
        ids: list[Ids] = []
        types: list[Ids] = []
        lengths: list[Ids] = []
        truncated: list[npt.NDArray[np.bool_]] = []
        for texts, rows in parts:
            lengths.append(texts.lengths[rows])
            truncated.append(texts.truncated[rows])
            starts = texts.starts[rows]
            ends = starts + lengths[-1]
            spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
            ids += [texts.ids[start:end] for start, end in spans]
            if texts.types is not None:
                types += [texts.types[start:end] for start, end in spans]
        each = np.concatenate(lengths)
        both = np.concatenate(types) if types else None
        return cls(np.concatenate(ids), np.cumsum(each) - each, each, np.concatenate(truncated), both)


class Tokenizer:
    """A tokenizer that truncates to `max_length` tokens, special ones included, and never pads."""

    def __init__(self, tokenizer_json: str, max_length: int, truncation_side: str = "right") -> None:
        self.backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        self.backend.no_padding()
        self.backend.enable_truncation(max_length, direction=truncation_side)
        self.max_length = max_length
        self._can_cut = truncation_side == "right"
        self._special_ids = {id for id, token in self.backend.get_added_tokens_decoder().items() if token.special}

    def __call__(self, texts: Sequence[Text]) -> TokenizedTexts:
        """Tokenize `texts`, not pairs; those over the limit are cut and marked as truncated."""
        whole = cast("Sequence[str]", texts)
        if max(map(len, whole), default=0) > LONG * self.max_length:
            whole = [self._prefix(text) for text in whole]
        if len(whole) == 1 and len(whole[0]) <= _SHORT:
            return self._one(whole[0])
        encodings = self._encodings(whole)
        count = len(encodings)
        lengths = np.fromiter(map(len, encodings), np.int64, count)
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.int64, int(lengths.sum()))
        truncated = np.fromiter((bool(e.overflowing) for e in encodings), np.bool_, count)
        return TokenizedTexts(ids, np.cumsum(lengths) - lengths, lengths, truncated)

    def _encodings(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        """Encode `texts` in the tokenizer's own threads, or here if they are short.

        In those threads, short texts would have to wait for all work that was queued before them.
        """
        if sum(map(len, texts)) <= _SHORT:
            return [self.backend.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def _one(self, text: str) -> TokenizedTexts:
        """Tokenize one short text, without the tokenizer's threads and numpy's cost for many."""
        encoding = self.backend.encode(text)
        ids = np.array(encoding.ids, np.int64)
        return TokenizedTexts(ids, _ZERO, np.array([len(ids)]), np.array([bool(encoding.overflowing)]))

    @cached_property
    def vocabulary(self) -> int:
        """One more than the largest id. Computed when needed, since it copies the vocabulary."""
        return 1 + max(self.backend.get_vocab().values(), default=-1)

    def tokenized(self, token_ids: Sequence[Sequence[int]]) -> TokenizedTexts:
        """Check texts that were tokenized elsewhere; those over the limit are cut and marked."""
        for index, ids in enumerate(token_ids):
            if not len(ids):
                raise ValueError(f"text {index} has no token ids")
            for kind in set(map(type, ids)):  # at the speed of C: a request may have millions
                if kind is bool or not issubclass(kind, (int, np.integer)):
                    wrong = next(id for id in ids if type(id) is kind)
                    raise TypeError(f"text {index}: a token id must be an int, got {wrong!r:.60}")
            for id in (min(ids), max(ids)):
                if not 0 <= id < self.vocabulary:
                    raise ValueError(f"text {index}: the model has no token {id}, its ids end at {self.vocabulary - 1}")
        lengths = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
        kept = np.minimum(lengths, self.max_length)
        cut = slice(self.max_length) if self._can_cut else slice(-self.max_length, None)
        flat = np.fromiter(chain.from_iterable(each[cut] for each in token_ids), np.int64, int(kept.sum()))
        return TokenizedTexts(flat, np.cumsum(kept) - kept, kept, lengths > kept)

    def special_ends(self) -> tuple[int, int]:
        """Return the number of special tokens before a text, and after it."""
        return special_ends(self.backend.encode("a"))

    def prompt_length(self, prompt: str) -> int:
        """Return how many leading tokens a prompt has, not counting a special one at its end."""
        ids = self.backend.encode(prompt).ids if prompt else []
        return len(ids) - 1 if ids and ids[-1] in self._special_ids else len(ids)

    def _prefix(self, text: str) -> str:
        """Return a prefix of a long text that gives the same tokens up to the limit."""
        size = _PREFIX * self.max_length
        while self._can_cut and size < len(text) // 2:
            if _is_settled(self.backend.encode_batch([text[:size]])[0], size):
                return text[:size]
            size *= 4
        return text


def special_ends(encoding: tokenizers.Encoding) -> tuple[int, int]:
    """Return the number of special tokens before the text, and after it."""
    added = encoding.special_tokens_mask
    return (added.index(0), added[::-1].index(0)) if 0 in added else (len(added), 0)


def _is_settled(prefix: tokenizers.Encoding, size: int) -> bool:
    """Return whether the tokens kept of a prefix of `size` characters are those of the full text.

    Cutting a text changes the word (or run of spaces) at the cut, and matches across words close to
    it, such as a special token or a character with its accents. So the kept tokens must end before
    that word and well before the cut.
    """
    if not prefix.overflowing:
        return False
    words = [word for word in prefix.overflowing[-1].word_ids if word is not None]
    kept_end = max((end for _, end in prefix.offsets), default=size)
    return bool(words) and words[-1] not in prefix.word_ids and kept_end <= size - _MARGIN
