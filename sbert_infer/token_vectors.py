"""A vector for each token of each text, from artifacts exported with `--outputs sentence,tokens`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .artifact import TOKENS, Manifest
from .errors import EngineError, TextError, TruncationError
from .pipeline import Pipeline
from .planner import Batch, plan_batches
from .tokenizer import TokenizedTexts

__all__ = ["TokenVectors", "check_has_tokens", "token_vectors"]

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TokenVectors:
    """What was asked for, and what it was made of."""

    vectors: list[Array]  # of each text: [its tokens, hidden], special tokens included
    tokens: int
    truncated: int  # texts that were cut to the model's limit


def check_has_tokens(manifest: Manifest) -> None:
    """Raise if the artifact gives no token vectors."""
    if TOKENS not in manifest.outputs:
        raise ValueError(f"{manifest.name} has no {TOKENS}: export it with --outputs sentence,tokens")


def token_vectors(
    pipeline: Pipeline,
    texts: Sequence[str],
    prompt: str,
    *,
    allow_truncation: bool,
    max_tokens: int | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> TokenVectors:
    """The vectors of the tokens of `texts`, with `prompt` before each, in order. More than `max_tokens` are refused."""
    if not hasattr(pipeline.backend, "run_tokens"):
        raise EngineError(f"{pipeline.backend.describe()} gives no token vectors: use Engine(..., device='cpu')")
    tokenized = pipeline.tokenizer([prompt + text for text in texts])
    if not allow_truncation and tokenized.truncated.any():
        first, limit = int(tokenized.truncated.argmax()), pipeline.tokenizer.max_length
        raise TruncationError(f"text {first} has more than {limit} tokens; shorten it or set on_truncate")
    tokens = int(tokenized.lengths.sum())
    if max_tokens is not None and tokens > max_tokens:
        raise ValueError(f"the texts have {tokens} tokens, at most {max_tokens} get vectors of their own at once")
    found: list[Array] = [np.empty((0, 0), np.float32)] * len(texts)
    backend = pipeline.backend
    batches = plan_batches(tokenized.lengths, backend.max_batch_tokens, edges=backend.edges)
    for batch in batches:
        if not is_wanted():
            raise EngineError("nobody waits for these vectors any more")
        pipeline.submit(_run_batch, pipeline, tokenized, batch, found).result()
    return TokenVectors(found, tokens, int(tokenized.truncated.sum()))


def _run_batch(pipeline: Pipeline, tokenized: TokenizedTexts, batch: Batch, out: list[Array]) -> int:
    ids, mask = pipeline.pad(tokenized, batch.rows, batch.length)
    vectors = cast(Any, pipeline.backend).run_tokens(ids, mask)  # [rows, length, hidden]
    for row, its, real in zip(batch.rows.tolist(), vectors, mask.astype(np.bool_), strict=True):
        out[row] = its[real]
        if not np.isfinite(out[row]).all():
            raise TextError(f"text {row}: the model gives NaN or infinity")
    return len(batch.rows)
