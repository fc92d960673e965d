"""A vector for each token of each text, from artifacts exported with `--outputs sentence,tokens`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import MULTI_VECTOR, TOKENS, Manifest
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.errors import CallTooLargeError, EngineError, TextError, TruncationError
from sbert_infer.text.batching import Batch, plan_batches
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer

__all__ = ["TokenVectors", "check_has_tokens", "run_batches", "run_tokens", "token_vectors"]

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
# A batch's ids and attention mask, and which of its tokens' vectors are wanted, all [rows, length].
Prepare = Callable[[Batch], tuple[Ids, Ids, npt.NDArray[np.bool_]]]


@dataclass(frozen=True)
class TokenVectors:
    """What was asked for, and what it was made of."""

    vectors: list[Array]  # of each text: [its tokens, hidden], special tokens included
    tokens: int
    truncated: int  # texts that were cut to the model's limit


def check_has_tokens(manifest: Manifest) -> None:
    """Raise if the artifact gives no token vectors."""
    if manifest.kind == MULTI_VECTOR:
        raise ValueError(f"{manifest.name} is a multi-vector encoder: use encode_query or encode_document")
    if TOKENS not in manifest.outputs:
        raise ValueError(f"{manifest.name} has no {TOKENS}: export it with --outputs sentence,tokens")


def token_vectors(
    pipeline: Pipeline,
    texts: Sequence[str],
    prompt: str,
    *,
    tokenizer: Tokenizer | None = None,
    allow_truncation: bool,
    max_tokens: int | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> TokenVectors:
    """The vectors of the tokens of `texts`, with `prompt` before each, in order. More than `max_tokens` are refused.

    `tokenizer` is the pipeline's own by default.
    """
    tokenized = (tokenizer or pipeline.tokenizer)([prompt + text for text in texts])
    if not allow_truncation and tokenized.truncated.any():
        first, limit = int(tokenized.truncated.argmax()), pipeline.tokenizer.max_length
        raise TruncationError(first, limit)
    tokens = int(tokenized.lengths.sum())
    if max_tokens is not None and tokens > max_tokens:
        message = f"the texts have {tokens} tokens, at most {max_tokens} get vectors of their own at once"
        raise CallTooLargeError(message, max_tokens)
    vectors = run_tokens(pipeline, tokenized, is_wanted=is_wanted)
    return TokenVectors(vectors, tokens, int(tokenized.truncated.sum()))


def run_tokens(pipeline: Pipeline, tokenized: TokenizedTexts, **options: Any) -> list[Array]:
    """The vectors of all tokens of each text. The options are those of `run_batches`."""

    def prepare(batch: Batch) -> tuple[Ids, Ids, npt.NDArray[np.bool_]]:
        ids, mask = pipeline.pad(tokenized, batch.rows, batch.length)
        return ids, mask, mask.astype(np.bool_)

    return run_batches(pipeline, tokenized.lengths, prepare, **options)


def run_batches(
    pipeline: Pipeline,
    lengths: Ids,
    prepare: Prepare,
    *,
    at_once: int = 1,
    max_batch_texts: int | None = None,
    progress: Callable[[int], object] = lambda count: None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Array]:
    """Run texts of these `lengths` in batches, `at_once` of them at a time: the wanted vectors of each, in order.

    If more than one may run at once and there is only one, it runs here and now, with all cores.
    """
    backend = pipeline.backend
    if not hasattr(backend, "run_tokens"):
        raise EngineError(f"{backend.describe()} gives no token vectors: use Engine(..., device='cpu')")
    found: list[Array] = [np.empty((0, 0), np.float32)] * len(lengths)
    batches = plan_batches(lengths, backend.max_batch_tokens, max_batch_texts, backend.edges)
    if at_once > 1 and len(batches) == 1:
        progress(_run_batch(pipeline, batches[0], prepare, found, alone=True))
        return found
    running: deque[Future[int]] = deque()
    try:
        for batch in batches:
            if not is_wanted():
                raise EngineError("nobody waits for these vectors any more")
            running.append(pipeline.submit(_run_batch, pipeline, batch, prepare, found))
            if len(running) >= at_once:
                progress(running.popleft().result())
        while running:
            progress(running.popleft().result())
    finally:
        for future in running:
            future.cancel()
    return found


def _run_batch(pipeline: Pipeline, batch: Batch, prepare: Prepare, out: list[Array], alone: bool = False) -> int:
    ids, mask, wanted = prepare(batch)
    vectors = cast(Any, pipeline.backend).run_tokens(ids, mask, alone=alone)  # [rows, length, hidden]
    for row, its, real in zip(batch.rows.tolist(), vectors, wanted, strict=True):
        out[row] = its[real]
        if not np.isfinite(out[row]).all():
            raise TextError(f"text {row}: the model gives NaN or infinity", row, is_finite=False)
    return len(batch.rows)
