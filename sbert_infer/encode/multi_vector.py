"""Multi-vector output, as of ColBERT: a vector for each token, in texts prepared for their role.

A query may be filled up with [MASK] tokens; their vectors count, even if other tokens do not attend
to them. In documents some tokens, often punctuation, get no vector. The manifest holds the `Role`s
that the model was trained with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import TOKENS, Manifest
from sbert_infer.backends.base import Array
from sbert_infer.encode.options import EncodeOptions
from sbert_infer.encode.output import Collector, Indices, Output, Window, not_finite
from sbert_infer.encode.results import convert_each, import_torch
from sbert_infer.encode.tokens import TokenRows, about_input, reordered
from sbert_infer.similarity import unit_rows
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer

NO_ROLE = "none"  # the role of texts that are encoded as neither query nor document


@dataclass(frozen=True)
class Role:
    """How to prepare the texts of one role."""

    max_length: int  # in tokens, special ones included
    skip_ids: Sequence[int] = ()  # ids of tokens that get no vector
    expand_to: int = 0  # shorter texts are filled up to this many tokens
    expansion_id: int = 0  # id of the token that fills them up
    attend_to_expansion: bool = False


def role_of(manifest: Manifest, task: str | None) -> Role:
    """Return the role for a task: "query", "document" or None."""
    roles = manifest.roles or {}
    if task is not None and task not in roles:
        raise ValueError(f"task must be 'query', 'document' or None, got {task!r}")
    return Role(**roles[task or NO_ROLE])


def multi_vector_features(engine: Any, texts: Iterable[str], single: bool, prompt: str, **options: Any) -> Any:
    """Return a dict of tensors for each text, as `encode(output_value=None)`.

    It has the `token_embeddings`, not normalized by `encode`, and the ids of the tokens that get
    one, unless a token pooling merges them.
    """
    torch, manifest, tokenizer, known = import_torch(), engine.manifest, engine.pipeline.tokenizer, list(texts)
    vectors = engine.encode(known, prompt=prompt, convert_to_numpy=False, **options)
    rows = [{TOKENS: each, "attention_mask": torch.ones(len(each), dtype=torch.int64)} for each in vectors]
    if options["token_pooling"] is None:
        role = role_of(manifest, options["task"])
        for row, text in zip(rows, known, strict=True):
            fitted = _fitted(tokenizer([prompt + text]), role, tokenizer.special_ends(), manifest.truncation_side)
            row["input_ids"] = torch.from_numpy(fitted.ids[_get_vectors(fitted, role)])
    rows = [row | about_input(engine, prompt) for row in rows]
    return rows[0] if single else rows


class MultiVectorOutput(Output):
    """An array [tokens, dim] for each text, for the tokens that get a vector in its role."""

    names = (TOKENS,)

    def __init__(
        self, manifest: Manifest, options: EncodeOptions, truncate_dim: int | None, tokenizer: Tokenizer
    ) -> None:
        """Make the output for the task in `options`; refuse options for one vector per text."""
        options.refuse(
            "precision truncate_dim convert_to_tensor convert_to_sparse_tensor save_to_cpu out",
            f"not for {manifest.name}, which gives a vector for each token",
            truncate_dim=truncate_dim,
        )
        if options.token_pooling is not None and not hasattr(options.token_pooling, "pool"):
            given = type(options.token_pooling).__name__
            raise TypeError(f"token_pooling must be a BaseTokenPooling of sentence-transformers, got {given}")
        if not options.convert_to_numpy or options.token_pooling is not None:
            import_torch()  # raises before the work is done if torch is missing
        self.role = role_of(manifest, options.task)
        self.max_length = self.role.max_length
        self.normalize, self.padding_side = options.normalize_embeddings, manifest.padding_side
        self._truncation_side, self._ends = manifest.truncation_side, tokenizer.special_ends()

    def fit(self, tokenized: TokenizedTexts) -> TokenizedTexts:
        """Cut each text to the role's limit and fill up short ones with the expansion token."""
        return _fitted(tokenized, self.role, self._ends, self._truncation_side)

    def collect(self, tokenized: TokenizedTexts) -> Collector:
        """Return an empty collector for these texts."""
        return _Rows(self, tokenized)

    def gather(self, windows: Iterator[Window], count: int, single: bool, options: EncodeOptions) -> Any:
        """Return a tensor or array for each text, or only one for a single text.

        Tensors unless arrays are asked for, as sentence-transformers does it.
        """
        each = [vectors for window in windows for vectors in window.vectors]
        if options.token_pooling is not None and each:
            tensors = convert_each(each, single=False, arrays=False)
            each = [pooled.numpy() for pooled in options.token_pooling.pool(tensors, task=options.task)]
        return convert_each(each, single, arrays=bool(options.convert_to_numpy))


class _Rows(Collector):
    def __init__(self, output: MultiVectorOutput, tokenized: TokenizedTexts) -> None:
        self._output, self._own = output, TokenRows(tokenized, output.padding_side)
        self._wanted = _get_vectors(tokenized, output.role)
        self._each: list[Array] = [np.empty((0, 0), np.float32)] * len(tokenized.lengths)

    def put(self, rows: Indices, found: Sequence[Array]) -> Indices:
        bad = [rows[:0]]
        for at, row in enumerate(rows.tolist()):
            start, stop = self._own.tokenized.span(row)
            self._each[row] = self._own(row, found[0][at])[self._wanted[start:stop]]
            bad.append(not_finite(rows[at : at + 1], self._each[row][None]))
        return np.concatenate(bad)

    def result(self, order: Indices | None) -> list[Array]:
        each = reordered(self._each, order)
        return [unit_rows(vectors) for vectors in each] if self._output.normalize else each


def _get_vectors(tokenized: TokenizedTexts, role: Role) -> npt.NDArray[np.bool_]:
    return ~np.isin(tokenized.ids, np.asarray(role.skip_ids, np.int64))


def _fitted(tokenized: TokenizedTexts, role: Role, ends: tuple[int, int], truncation_side: str) -> TokenizedTexts:
    """Cut texts to the role's limit, keeping special tokens, and fill up the short ones."""
    kept = np.minimum(tokenized.lengths, role.max_length)
    lengths = np.maximum(kept, role.expand_to)
    starts = np.cumsum(lengths) - lengths
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(row)) - starts[row]
    # Tokens before `turn` are taken from the text's start, the others from its end.
    turn = kept - ends[1] if truncation_side == "right" else np.full_like(kept, ends[0])
    place += np.where(place < turn[row], 0, (tokenized.lengths - kept)[row])
    real = place < tokenized.lengths[row]
    where = np.where(real, tokenized.starts[row] + place, 0)
    ids = tokenized.ids if len(tokenized.ids) else np.zeros(1, np.int64)
    fitted = np.where(real, ids[where], role.expansion_id)
    truncated = tokenized.truncated | (tokenized.lengths > role.max_length)
    attended = None if role.attend_to_expansion or not role.expand_to else kept
    return TokenizedTexts(fitted, starts, lengths, truncated, attended=attended)
