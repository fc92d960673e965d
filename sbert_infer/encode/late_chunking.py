"""Late chunking: vectors of spans, pooled from the token vectors of one pass over the document.

So the vector of a span reflects its context. A token belongs to the span that contains its first
character other than a space. Special tokens at the start and the prompt's tokens belong to the
document's first character, special tokens at the end to its last. So a single span over the whole
document has the same vector as `encode` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.encode.output import EncodeStats
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.encode.tokens import TokensOutput, check_has_tokens
from sbert_infer.errors import TextError
from sbert_infer.similarity import unit_rows
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer, special_ends

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Spans = Sequence[tuple[int, int]]  # character offsets (start, end) in a document; end is exclusive

_MAX_TOKENS = 2**16  # whose vectors are held at once: 200 MB with 768 dimensions
_OVERLAP = 4  # neighbouring windows share at least a quarter of their tokens


@dataclass(frozen=True)
class TokenWindow:
    """The tokens from `start` to `stop`, which run together; those from `first` to `last` are used.

    Both ends are exclusive. The other tokens are context; they get vectors from other windows.
    """

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class _Document:
    """The tokens of a document."""

    head: list[int]  # special tokens at the start, and the prompt
    body: list[int]
    tail: list[int]  # special tokens at the end
    positions: Ids  # for each token of the body, the character that decides which span it belongs to
    windows: list[TokenWindow]  # of the body

    @property
    def runs(self) -> list[list[int]]:
        """The ids of each window, which the model runs as a text of its own."""
        return [[*self.head, *self.body[window.start : window.stop], *self.tail] for window in self.windows]

    def assemble(self, runs: list[Array]) -> Array:
        """Return one vector for each token of head, body and tail, from those of the windows."""
        head, tail = len(self.head), len(self.tail)
        body = [
            vectors[head + window.first - window.start : head + window.last - window.start]
            for window, vectors in zip(self.windows, runs, strict=True)
        ]
        return np.concatenate([runs[0][:head], *body, runs[-1][len(runs[-1]) - tail :]])

    def rows_of(self, spans: Ids, size: int, skip: int, name: str) -> tuple[Ids, Ids]:
        """Return the first token of each span and its end offset (exclusive).

        The first `skip` tokens are those of a prompt that pooling leaves out.
        """
        head, tail = len(self.head), len(self.tail)
        positions = np.concatenate([np.zeros(head, np.int64), self.positions, np.full(tail, size - 1)])
        first, last = (np.maximum(np.searchsorted(positions, edge), skip) for edge in spans.T)
        own = np.minimum(last, len(positions) - tail) - np.maximum(first, head)  # without special tokens
        if len(bad := np.flatnonzero(own < 1)):
            start, end = spans[bad[0]].tolist()
            raise ValueError(f"{name}: no token begins in the span ({start}, {end}): make it longer, or leave it out")
        return first, last


def check_can_pool(manifest: Manifest) -> None:
    """Raise unless the model's vectors are means of its token vectors, normalized or not."""
    check_has_tokens(manifest)
    if manifest.pooling != ("mean",):
        raise ValueError(f"{manifest.name} has {'+'.join(manifest.pooling)} pooling: spans need mean pooling")
    if manifest.head:
        names = ", ".join(manifest.head)
        raise ValueError(f"{manifest.name} has {names} behind its pooling, in the graph: it can't pool spans")


def encode_spans(
    pipeline: Pipeline, manifest: Manifest, documents: Sequence[str], spans: Sequence[Spans], prompt: str
) -> tuple[list[Array], EncodeStats]:
    """Return the vectors of the spans of each document, [spans, dim], and the statistics."""
    skip = 0 if manifest.include_prompt else pipeline.tokenizer.prompt_length(prompt)
    from_left = manifest.truncation_side == "left"
    known = [_tokenize(pipeline.tokenizer, from_left, prompt, text) for text in documents]
    rows = [
        document.rows_of(_checked(text, its, f"document {index}"), len(text), skip, f"document {index}")
        for index, (text, its, document) in enumerate(zip(documents, spans, known, strict=True))
    ]
    output, stats = TokensOutput(manifest), EncodeStats()
    pooled: list[npt.NDArray[np.float64]] = []
    for some in _groups(known):
        runs = [(index, run) for index, document in enumerate(known[some], some.start) for run in document.runs]
        try:
            window = pipeline.run_tokenized(_joined([run for _, run in runs]), output)
        except TextError as error:  # which names a run
            index = runs[error.index][0]
            message = f"the model gives NaN or infinity for document {index}"
            raise TextError(message, index, not_finite=True) from None
        stats += replace(window.stats, texts=len(known[some]), unique_texts=len(known[some]))
        found = iter(window.vectors)
        pooled += [
            _pool(document.assemble([next(found) for _ in document.windows]), *its)
            for document, its in zip(known[some], rows[some], strict=True)
        ]
    return [(unit_rows(means) if manifest.normalized else means).astype(np.float32) for means in pooled], stats


def _groups(documents: Sequence[_Document]) -> Iterator[slice]:
    """Yield groups of at most `_MAX_TOKENS` tokens, but at least one document."""
    ends = np.cumsum([sum(map(len, document.runs)) for document in documents])
    start = 0
    while start < len(documents):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _MAX_TOKENS, side="right")))
        yield slice(start, stop)
        start = stop


def token_windows(tokens: int, most: int) -> list[TokenWindow]:
    """Return overlapping windows of at most `most` tokens that cover `tokens` evenly.

    A token in two windows gets its vector from the one in which it is farther from the edge.

    >>> token_windows(10, 8)
    [TokenWindow(start=0, stop=8, first=0, last=5), TokenWindow(start=2, stop=10, first=5, last=10)]
    """
    if tokens <= most:
        return [TokenWindow(0, tokens, 0, tokens)]
    overlap = most // _OVERLAP
    count = -(-(tokens - overlap) // (most - overlap))
    starts = [index * (tokens - most) // (count - 1) for index in range(count)]
    cuts = [(start + following + most) // 2 for start, following in pairwise(starts)]
    return [
        TokenWindow(start, start + most, first, last)
        for start, first, last in zip(starts, [0, *cuts], [*cuts, tokens], strict=True)
    ]


def _checked(text: str, spans: Any, name: str) -> Ids:
    """Return `spans` as an array [spans, 2]; raise for one that is not within the document."""
    edges = [tuple(span) if isinstance(span, Iterable) else (span,) for span in spans]
    for edge in edges:
        if len(edge) != 2 or not all(isinstance(place, (int, np.integer)) for place in edge):
            raise TypeError(f"{name}: a span must be two int, its start and end in characters, got {edge!r:.60}")
        if not 0 <= edge[0] < edge[1] <= len(text):
            raise ValueError(f"{name}: no span ({edge[0]}, {edge[1]}) in a text of {len(text)} characters")
    return np.array(edges, np.int64).reshape(-1, 2)


def _tokenize(tokenizer: Tokenizer, from_left: bool, prompt: str, text: str) -> _Document:
    encoding = tokenizer.backend.encode_batch([prompt + text])[0]  # `encode` would hold the GIL
    pieces = [encoding, *encoding.overflowing]  # each cut to the limit, with special tokens
    before, after = special_ends(encoding)
    front, back = encoding.ids[:before], encoding.ids[len(encoding.ids) - after :]
    tokens = [
        (id, offset)
        for piece in (reversed(pieces) if from_left else pieces)
        for id, offset, added in zip(piece.ids, piece.offsets, piece.special_tokens_mask, strict=True)
        if not added
    ]
    ids, offsets = [id for id, _ in tokens], np.array([offset for _, offset in tokens], np.int64).reshape(-1, 2)
    positions = _first_characters(prompt + text, offsets) - len(prompt)
    prompted = int((positions < 0).sum())
    head = [*front, *ids[:prompted]]
    if (most := tokenizer.max_length - len(head) - len(back)) < 1:
        raise ValueError(f"the prompt leaves no room for the document: it has {len(head) + len(back)} tokens")
    positions = np.minimum(positions[prompted:], max(0, len(text) - 1))
    return _Document(head, ids[prompted:], back, positions, token_windows(len(ids) - prompted, most))


def _first_characters(text: str, offsets: Ids) -> Ids:
    """Return the first character of each token that is not a space.

    Some tokenizers include the space before a word.
    """
    solid = np.flatnonzero([not character.isspace() for character in text])
    if not len(solid):
        return offsets[:, 0]
    following = solid[np.minimum(np.searchsorted(solid, offsets[:, 0]), len(solid) - 1)]
    inside = (following >= offsets[:, 0]) & (following < offsets[:, 1])
    # Positions must not decrease, because they are searched later.
    return np.maximum.accumulate(np.where(inside, following, offsets[:, 0]))


def _joined(runs: list[list[int]]) -> TokenizedTexts:
    lengths = np.fromiter(map(len, runs), np.int64, len(runs))
    ids = np.fromiter((id for run in runs for id in run), np.int64, int(lengths.sum()))
    return TokenizedTexts(ids, np.cumsum(lengths) - lengths, lengths, np.zeros(len(runs), np.bool_))


def _pool(vectors: Array, first: Ids, last: Ids) -> npt.NDArray[np.float64]:
    """Return the mean of the rows from each `first` to its `last` (exclusive)."""
    means = [vectors[a:b].mean(axis=0, dtype=np.float64) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    return np.stack(means) if means else np.empty((0, vectors.shape[1]))
