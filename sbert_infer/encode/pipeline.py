"""From texts to vectors, window by window: tokenize, plan batches, let the workers run them.

While the workers run one window, the calling thread already tokenizes the next.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sbert_infer.backends.base import Backend
from sbert_infer.errors import EngineError, TruncationError
from sbert_infer.text.batching import Batch, plan_batches
from sbert_infer.text.inputs import check_pairs, check_texts, prepend
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer
from sbert_infer.types import Text

__all__ = ["EncodeStats", "Pipeline", "Window", "unique_texts"]

Indices = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Item = TypeVar("Item", bound=Text)

# Texts that are sorted together: enough for little padding, few enough to hold memory flat.
WINDOW_TEXTS = 4096


@dataclass(frozen=True)
class EncodeStats:
    """What one call of `encode` did."""

    texts: int = 0
    unique_texts: int = 0  # identical texts run once
    truncated: int = 0  # texts cut to the model's limit
    tokens: int = 0  # of the unique texts, after truncation
    padded_tokens: int = 0  # tokens that ran, padding included
    batches: int = 0

    @property
    def padding(self) -> float:
        """The share of the work that was padding, 0 to 1."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    def __add__(self, other: EncodeStats) -> EncodeStats:
        names = self.__dataclass_fields__
        return EncodeStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class Window:
    """The vectors of consecutive texts, in order, from text `start` on."""

    start: int
    vectors: Any  # an array [texts, dim], or what `rows` of `Pipeline.run` makes
    stats: EncodeStats


class Pipeline:
    """Runs texts through a tokenizer and a backend on worker threads. Safe to use from many threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        backend: Backend,
        *,
        dim: int,
        pad_id: int,
        padding_side: str,
        pairs: bool = False,  # of texts, instead of texts
    ) -> None:
        self.tokenizer = tokenizer
        self.backend = backend
        self.dim = dim
        self.noun = "pair" if pairs else "text"
        self._check: Callable[[Sequence[object], int], None] = check_pairs if pairs else check_texts
        self._pad_id, self._padding_side = pad_id, padding_side
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0
        self._closed = False

    def run(
        self,
        texts: Iterable[Text],
        *,
        prompt: str = "",
        prompt_length: int = 0,
        max_batch_texts: int | None = None,
        allow_truncation: bool = True,
        progress: Callable[[int], object] = lambda count: None,
        rows: Callable[[int], Any] | None = None,
    ) -> Iterator[Window]:
        """The vectors of `texts`, in order. `prompt_length` leading tokens are left out of pooling.

        `rows` makes what the vectors of so many texts are put into; by default, an array.
        """
        start, source = 0, iter(texts)
        running: deque[_Work] = deque()
        try:
            while chunk := list(islice(source, WINDOW_TEXTS)):
                self._check(chunk, start)
                work = _Work(self, chunk, start, prompt, rows or self._dense)
                if not allow_truncation:
                    work.refuse_truncation()
                work.begin(prompt_length, max_batch_texts)
                running.append(work)
                start += len(chunk)
                if len(running) > 1:
                    yield running[0].finish(progress)
                    running.popleft()
            if running:
                yield running[0].finish(progress)
        finally:
            for work in running:
                work.cancel()

    def _dense(self, count: int) -> Vectors:
        return np.empty((count, self.dim), np.float32)

    def run_together(self, texts: Sequence[Text]) -> Vectors:
        """All `texts` in one batch, padded to the longest, as `run` never would: to see that it makes no difference."""
        tokenized = self.tokenizer(texts)
        vectors = np.empty((len(texts), self.dim), np.float32)
        self.run_batch(tokenized, Batch(np.arange(len(texts)), int(tokenized.lengths.max())), 0, vectors)
        return vectors

    def run_batch(
        self, tokenized: TokenizedTexts, batch: Batch, prompt_length: int, out: Vectors, alone: bool = False
    ) -> int:
        """Run one batch and put its vectors into their rows of `out`. Returns how many texts it held."""
        ids, mask = self.pad(tokenized, batch.rows, batch.length)
        out[batch.rows] = self.backend.run(ids, mask, prompt_length, alone=alone)
        return len(batch.rows)

    def pad(self, tokenized: TokenizedTexts, rows: Indices, length: int) -> tuple[Indices, Indices]:
        """Ids and mask of some texts, both [rows, length], padded as the model wants it."""
        return tokenized.padded(rows, length, self._pad_id, self._padding_side)

    def submit(self, function: Callable[..., int], *args: object) -> Future[int]:
        """Hand work to a worker thread, started at first use and again after a fork, which threads do not survive."""
        with self._lock:
            if self._closed:
                raise EngineError("the engine was closed during this call")
            if self._executor is None or self._pid != os.getpid():
                self._executor = ThreadPoolExecutor(self.backend.workers, thread_name_prefix="sbert-infer")
                self._pid = os.getpid()
            return self._executor.submit(function, *args)

    def close(self) -> None:
        """Stop the workers."""
        with self._lock:
            self._closed = True
            if self._executor is not None and self._pid == os.getpid():
                self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None


class _Work:
    """One window on its way through the workers."""

    def __init__(
        self, pipeline: Pipeline, texts: list[Text], start: int, prompt: str, rows: Callable[[int], Any]
    ) -> None:
        self.pipeline, self.start, self.count = pipeline, start, len(texts)
        unique, self.inverse = unique_texts(texts)
        self.tokenized = pipeline.tokenizer(prepend(prompt, unique) if prompt else unique)
        truncated = self.tokenized.truncated if self.inverse is None else self.tokenized.truncated[self.inverse]
        self.truncated: list[int] = (np.flatnonzero(truncated) + start).tolist()
        self.vectors = rows(len(unique))
        self.batches: list[Batch] = []
        self.futures: list[Future[int]] = []

    def refuse_truncation(self) -> None:
        if self.truncated:
            limit, noun = self.pipeline.tokenizer.max_length, self.pipeline.noun
            raise TruncationError(self.truncated[0], limit, noun=noun)

    def begin(self, prompt_length: int, max_batch_texts: int | None) -> None:
        """Hand the batches to the workers. A single one runs here and now: a hand-over would only add latency."""
        edges = self.pipeline.backend.edges
        self.batches = plan_batches(self.tokenized.lengths, self._budget(), max_batch_texts, edges)
        args = [(self.tokenized, batch, prompt_length, self.vectors) for batch in self.batches]
        if len(args) == 1:
            self.pipeline.run_batch(*args[0], alone=True)
        else:
            self.futures = [self.pipeline.submit(self.pipeline.run_batch, *arg) for arg in args]

    def _budget(self) -> int:
        """Tokens per batch: the backend's best, but so that a small call still gives every worker something to do."""
        backend = self.pipeline.backend
        if backend.workers == 1:
            return backend.max_batch_tokens
        share = -(-int(self.tokenized.lengths.sum()) // backend.workers)
        return min(backend.max_batch_tokens, max(share, backend.min_batch_tokens))

    def finish(self, progress: Callable[[int], object]) -> Window:
        done = 0
        for future in as_completed(self.futures):
            if future.cancelled():
                raise EngineError("the engine was closed during this call")
            done += future.result()
            progress(future.result())
        progress(self.count - done)
        vectors = self.vectors if self.inverse is None else self.vectors[self.inverse]
        self._check_finite(vectors)
        return Window(self.start, vectors, self._stats())

    def cancel(self) -> None:
        # Only for those that run: a cancelled one is never "done" once the executor is shut down.
        wait([future for future in self.futures if not future.cancel()])

    def _check_finite(self, vectors: Any) -> None:
        bad = vectors.not_finite() if hasattr(vectors, "not_finite") else _not_finite(vectors)
        if len(bad):
            which = f"{self.pipeline.noun} {bad[0] + self.start}"
            raise EngineError(f"the model gives NaN or infinity for {which} ({len(bad)} in all)")

    def _stats(self) -> EncodeStats:
        return EncodeStats(
            texts=self.count,
            unique_texts=len(self.vectors),
            truncated=len(self.truncated),
            tokens=int(self.tokenized.lengths.sum()),
            padded_tokens=sum(len(batch.rows) * batch.length for batch in self.batches),
            batches=len(self.batches),
        )


def _not_finite(vectors: Vectors) -> Indices:
    """The rows that have a NaN or an infinity."""
    # A sum is finite only if every term is: cheaper than asking each one, and exact enough to look
    # closer.
    with np.errstate(invalid="ignore", over="ignore"):
        total = vectors.sum()
    return np.empty(0, np.int64) if np.isfinite(total) else np.flatnonzero(~np.isfinite(vectors).all(axis=1))


def unique_texts(texts: list[Item]) -> tuple[list[Item], Indices | None]:
    """Each text once, and where each original finds its own; None when all differ."""
    if len(texts) == 1:
        return texts, None
    places = dict(zip(dict.fromkeys(texts), range(len(texts)), strict=False))
    if len(places) == len(texts):
        return texts, None
    return list(places), np.fromiter((places[text] for text in texts), np.int64, len(texts))
