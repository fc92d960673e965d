"""Running every kind of batch before the first caller comes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from sbert_infer.backends.base import Backend, Batch
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.scheduling.limits import Limits

# Where a backend runs any length, a new one costs only some memory. Longer texts take much longer
# and tell nothing new.
_LENGTHS = (8, 32, 128, 512)


def warm_up(pipeline: Pipeline, outputs: Sequence[str], limits: Limits) -> None:
    """Run a lone text and full batches of each length, the batches in all workers at once.

    A backend of packed rows has run all its shapes when it is open.
    """
    backend, lengths = pipeline.backend, _lengths(limits)
    if backend.packer is not None:
        return
    for length in (lengths[0], *lengths):  # on a CPU, the second opens the session for lone batches
        backend.run(_batch(pipeline, 1, length), outputs, alone=True)
    with ThreadPoolExecutor(backend.workers, thread_name_prefix="sbert-infer-warm") as threads:
        for length in lengths:
            batch = _batch(pipeline, _rows(limits, length), length)
            list(threads.map(partial(_run, backend, batch, outputs), range(backend.workers)))


def _run(backend: Backend, batch: Batch, outputs: Sequence[str], _: int) -> None:
    backend.run(batch, outputs)


def _lengths(limits: Limits) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(length, limits.max_length) for length in _LENGTHS))


def _rows(limits: Limits, length: int) -> int:
    rows = max(1, limits.max_batch_tokens // length)
    return rows if limits.max_batch_texts is None else min(rows, limits.max_batch_texts)


def _batch(pipeline: Pipeline, rows: int, length: int) -> Batch:
    """Return a batch of ordinary tokens without padding."""
    ids = np.resize(pipeline.tokenizer(["a"]).ids, (rows, length)).astype(np.int64)
    return Batch(ids, np.ones_like(ids))
