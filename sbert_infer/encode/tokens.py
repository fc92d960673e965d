"""A vector for each token, if exported with `--outputs sentence,tokens`, and all else of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sbert_infer.artifact.manifest import ENCODER, MULTI_VECTOR, SENTENCE, TOKENS, Manifest
from sbert_infer.backends.base import Array
from sbert_infer.encode.options import EncodeOptions
from sbert_infer.encode.output import Collector, Indices, Output, Window, not_finite
from sbert_infer.encode.results import convert_each
from sbert_infer.errors import CallTooLargeError
from sbert_infer.text.tokenizer import TokenizedTexts


def check_has_tokens(manifest: Manifest) -> None:
    """Raise unless the artifact has token vectors."""
    if manifest.kind == MULTI_VECTOR:
        raise ValueError(f"{manifest.name} is a multi-vector encoder: use encode_query or encode_document")
    if TOKENS not in manifest.outputs:
        raise ValueError(f"{manifest.name} has no {TOKENS}: export it with --outputs sentence,tokens")


class TokensOutput(Output):
    """An array [tokens, hidden] for each text, special tokens included."""

    names = (TOKENS,)

    def __init__(self, manifest: Manifest, *, max_tokens: int | None = None) -> None:
        """Make the output; with `max_tokens`, it refuses texts with more tokens in total."""
        check_has_tokens(manifest)
        self._padding_side, self._max_tokens, self._tokens = manifest.padding_side, max_tokens, 0

    def check(self, tokenized: TokenizedTexts, order: Indices | None) -> None:
        """Raise if these texts, with those before them, have more than `max_tokens`."""
        self._tokens += tokenized.tokens(order)  # duplicates run once, but each gets its vectors
        if self._max_tokens is not None and self._tokens > self._max_tokens:
            most = self._max_tokens
            message = f"the texts have {self._tokens} tokens, at most {most} get vectors of their own at once"
            raise CallTooLargeError(message, most)

    def collect(self, tokenized: TokenizedTexts) -> Collector:
        """Return an empty collector for these texts."""
        return _Rows(tokenized, self._padding_side)

    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> Any:
        """Return an array or tensor for each text, or only one for a single text."""
        each = [vectors for window in windows for vectors in window.vectors]
        return convert_each(each, single, arrays=options.as_arrays)


class TokenRows:
    """Strips the padding from the rows of a batch."""

    def __init__(self, tokenized: TokenizedTexts, padding_side: str) -> None:
        self.tokenized, self._left = tokenized, padding_side == "left"

    def __call__(self, row: int, padded: Array) -> Array:
        """Return the part of `padded`, [length, ...], that belongs to the text `row`."""
        count = int(self.tokenized.lengths[row])
        return padded[len(padded) - count :] if self._left else padded[:count]


class _Rows(Collector):
    def __init__(self, tokenized: TokenizedTexts, padding_side: str) -> None:
        self._own = TokenRows(tokenized, padding_side)
        self._each: list[Array] = [np.empty((0, 0), np.float32)] * len(tokenized.lengths)

    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        bad = [rows[:0]]
        for at, row in enumerate(rows.tolist()):
            self._each[row] = self._own(row, found[0][at]).copy()  # a view would keep the whole batch alive
            bad.append(not_finite(rows[at : at + 1], self._each[row][None]))
        return np.concatenate(bad)

    def result(self, order: Indices | None) -> list[Array]:
        return reordered(self._each, order)


def reordered(each: list[Array], order: Indices | None) -> list[Array]:
    """Return the arrays in this order; identical texts get copies that share no memory."""
    return each if order is None else [each[row].copy() for row in order.tolist()]


def encode_features(engine: Any, texts: Iterable[str], single: bool, prompt: str, **options: Any) -> Any:
    """Return a dict of tensors for each text, as `encode(output_value=None)`.

    It has the token ids and attention mask, without padding, the `sentence_embedding` and, if the
    artifact holds them, the `token_embeddings`. Nothing is normalized.
    """
    if engine.manifest.kind != ENCODER:
        raise ValueError(f"output_value=None: not for {engine.manifest.name}, which is a sparse encoder")
    known = list(texts)
    found = {SENTENCE: engine.encode(known, prompt=prompt, convert_to_tensor=True, **options)}
    if TOKENS in engine.manifest.outputs:
        options.pop("truncate_dim")
        tokens = engine.encode(known, prompt=prompt, output_value=TOKENS, convert_to_numpy=False, **options)
        found[TOKENS] = tokens
    own = engine.for_task(options["task"])
    rows = [{name: rows[0] for name, rows in own.preprocess([text], prompt).items()} for text in known]
    about = about_input(own, prompt)
    rows = [{**row, **{name: each[at] for name, each in found.items()}, **about} for at, row in enumerate(rows)]
    return rows[0] if single else rows


def about_input(engine: Any, prompt: str) -> dict[str, Any]:
    """Return what all texts of a call have in common, as `encode(output_value=None)` tells it."""
    length = {"prompt_length": engine.pipeline.tokenizer.prompt_length(prompt)} if prompt else {}
    return {"modality": "text", **length}
