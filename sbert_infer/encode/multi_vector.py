"""Multi-vector encoders (ColBERT and the like): a vector for each token of a text, prepared by the text's role.

A query may be filled up with [MASK] tokens, whose vectors count though the others may not attend to
them; of documents some tokens, often punctuation, get no vector. What the model was trained with is
in the manifest, as `Role`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import MULTI_VECTOR, Manifest
from sbert_infer.encode.pipeline import WINDOW_TEXTS, Pipeline
from sbert_infer.encode.results import Asked, progress_bar
from sbert_infer.encode.tokens import run_batches
from sbert_infer.errors import TruncationError, warn
from sbert_infer.similarity import unit_rows
from sbert_infer.text.batching import Batch
from sbert_infer.text.inputs import check_texts
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer

if TYPE_CHECKING:
    from sbert_infer.engine import Engine

__all__ = [
    "NO_ROLE",
    "Role",
    "check_multi_vector",
    "encode_multi_vector",
    "is_multi_vector",
    "role_of",
]

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

NO_ROLE = "none"  # of texts that are encoded as neither query nor document


@dataclass(frozen=True)
class Role:
    """How the texts of one role are prepared."""

    max_length: int  # in tokens, special ones included
    skip_ids: Sequence[int] = ()  # of tokens that get no vector
    expand_to: int = 0  # tokens that a shorter text is filled up to
    expansion_id: int = 0  # with this one
    attend_to_expansion: bool = False


def is_multi_vector(manifest: Manifest) -> bool:
    """Whether it gives vectors of tokens, and no others."""
    return manifest.kind == MULTI_VECTOR


def role_of(manifest: Manifest, task: str | None) -> Role:
    """The role of a task: "query", "document" or None."""
    roles = manifest.roles or {}
    if task is not None and task not in roles:
        raise ValueError(f"task must be 'query', 'document' or None, got {task!r}")
    return Role(**roles[task or NO_ROLE])


def check_multi_vector(manifest: Manifest, what: str) -> None:
    """Refuse, by name, what is done to one vector a text."""
    if is_multi_vector(manifest):
        raise ValueError(f"{what}: {_not_for(manifest)}")


def _not_for(manifest: Manifest) -> str:
    return f"not for {manifest.name}, which gives a vector for each token"


def encode_multi_vector(engine: Engine, inputs: Iterable[str], asked: Asked) -> list[Array]:
    """The vectors of each text, [tokens, dim]."""
    asked = asked.or_truncated_to(engine.truncate_dim)
    asked.refuse("precision truncate_dim convert_to_tensor out", _not_for(engine.manifest))
    texts = list(inputs)
    check_texts(texts)
    role, pipeline, truncated = role_of(engine.manifest, asked.task), engine._open(), 0
    found: list[Array] = []
    with progress_bar(len(texts), asked.show_progress_bar) as progress:
        for start in range(0, len(texts), WINDOW_TEXTS):
            tokenized = pipeline.tokenizer([asked.prompt + text for text in texts[start : start + WINDOW_TEXTS]])
            cut = tokenized.truncated | (tokenized.lengths > role.max_length)
            if engine.on_truncate == "error" and cut.any():
                raise TruncationError(start + int(cut.argmax()), role.max_length)
            truncated += int(cut.sum())
            found += _run_role(pipeline, tokenized, role, engine.manifest.truncation_side, asked.batch_size, progress)
    if truncated and engine.on_truncate == "warn":
        warn(f"{truncated} of {len(texts)} texts were cut to {role.max_length} tokens; see Engine(on_truncate=...)")
    return [unit_rows(vectors) for vectors in found] if asked.normalize_embeddings else found


def _run_role(
    pipeline: Pipeline,
    tokenized: TokenizedTexts,
    role: Role,
    truncation_side: str,
    max_batch_texts: int | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> list[Array]:
    """The vectors of each text."""
    own = _fitted(tokenized, role, _special_tokens(pipeline.tokenizer), truncation_side)
    real = np.minimum(tokenized.lengths, role.max_length)
    return run_batches(
        pipeline,
        own.lengths,
        _Prepare(pipeline, own, real, role),
        at_once=2 * pipeline.backend.workers,
        max_batch_texts=max_batch_texts,
        progress=progress,
    )


@dataclass(frozen=True)
class _Prepare:
    """Makes what runs of a batch."""

    pipeline: Pipeline
    tokenized: TokenizedTexts
    real: Ids  # how many tokens of each text are its own
    role: Role

    def __call__(self, batch: Batch) -> tuple[Ids, Ids, npt.NDArray[np.bool_]]:
        ids, mask = self.pipeline.pad(self.tokenized, batch.rows, batch.length)
        wanted = mask.astype(np.bool_) & ~np.isin(ids, np.asarray(self.role.skip_ids, np.int64))
        if self.role.expand_to and not self.role.attend_to_expansion:  # such models are padded on the right
            mask = mask * (np.arange(batch.length) < self.real[batch.rows, None])
        return ids, mask, wanted


def _special_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """How many special tokens stand before a text, and how many behind it."""
    added = tokenizer.backend.encode("a").special_tokens_mask
    if 0 not in added:
        return len(added), 0
    return added.index(0), added[::-1].index(0)


def _fitted(tokenized: TokenizedTexts, role: Role, ends: tuple[int, int], truncation_side: str) -> TokenizedTexts:
    """Each text cut to the role's limit, its special tokens kept, and filled up with the expansion token."""
    kept = np.minimum(tokenized.lengths, role.max_length)
    lengths = np.maximum(kept, role.expand_to)
    starts = np.cumsum(lengths) - lengths
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(row)) - starts[row]
    # Up to here tokens count from the text's start, and from here on back from its end.
    turn = kept - ends[1] if truncation_side == "right" else np.full_like(kept, ends[0])
    place += np.where(place < turn[row], 0, (tokenized.lengths - kept)[row])
    real = place < tokenized.lengths[row]
    where = np.where(real, tokenized.starts[row] + place, 0)
    ids = tokenized.ids if len(tokenized.ids) else np.zeros(1, np.int64)
    fitted = np.where(real, ids[where], role.expansion_id)
    return TokenizedTexts(fitted, starts, lengths, tokenized.truncated)
