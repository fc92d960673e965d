"""The synchronous runner: texts to tokens, tokens to batches, batches through the backend.

Texts run in windows: while the workers run one window, the calling thread tokenizes the next. The
`Output` (`encode/output.py`) decides what to keep of each batch. Duplicates, truncation, progress
and statistics are handled here, for every kind of output.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from sbert_infer.backends.base import CLOSED, Array, Backend, Batch, Packing
from sbert_infer.encode.output import Collector, EncodeStats, Indices, Output, Window
from sbert_infer.errors import EngineError, TextError, TruncationError
from sbert_infer.text.batching import PaddedRows, cut_batches
from sbert_infer.text.inputs import check_pairs, check_texts, prepend
from sbert_infer.text.packing import PackedRows
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer
from sbert_infer.types import Text

Item = TypeVar("Item", bound=Text)
Rows = PaddedRows | PackedRows  # texts that run together
Progress = Callable[[int], object]  # called with the number of texts finished since its last call

# Texts that are sorted together: enough for little padding, few enough to bound memory.
WINDOW_TEXTS = 4096


def no_progress(count: int) -> None:
    """Report nothing."""


class Pipeline:
    """Runs texts through a tokenizer and a backend. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, backend: Backend, *, pad_id: int, padding_side: str, pairs: bool = False
    ) -> None:
        """Make a pipeline; with `pairs`, its inputs are pairs of texts."""
        self.tokenizer = tokenizer
        self.backend = backend
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
        output: Output,
        *,
        prompt: str = "",
        prompt_length: int = 0,
        max_batch_texts: int | None = None,
        allow_truncation: bool = True,
        progress: Progress = no_progress,
        tokenizer: Tokenizer | None = None,
        is_wanted: Callable[[], bool] | None = None,
    ) -> Iterator[Window]:
        """Yield the output of `texts`, in order, a few thousand at a time.

        Args:
            texts: the texts or pairs, read lazily.
            output: the kind of output to collect.
            prompt: a text to put before each text.
            prompt_length: leading tokens that pooling leaves out.
            max_batch_texts: the most texts in a batch.
            allow_truncation: if False, raise for a text over the limit.
            progress: called after each batch.
            tokenizer: by default the pipeline's own.
            is_wanted: if given, batches run one by one in this thread; it is called before each of
                them, and the run ends with an error if it returns False.

        """
        self._require(output)
        start, source = 0, iter(texts)
        running: deque[_Run] = deque()
        try:
            while chunk := list(islice(source, WINDOW_TEXTS)):
                self._check(chunk, start)
                unique, inverse = unique_texts(chunk)
                tokenized = output.fit((tokenizer or self.tokenizer)(prepend(prompt, unique) if prompt else unique))
                if not allow_truncation:
                    self.refuse_truncation(tokenized, inverse, output, start)
                output.check(tokenized, inverse)
                run = _Run(self, tokenized, output, prompt_length, start, inverse)
                run.begin(max_batch_texts, is_wanted)
                running.append(run)
                start += len(chunk)
                if len(running) > 1:
                    yield running[0].finish(progress)
                    running.popleft()
            if running:
                yield running[0].finish(progress)
        finally:
            for run in running:
                run.cancel()

    def run_tokenized(self, tokenized: TokenizedTexts, output: Output) -> Window:
        """Return the output of texts that are already tokenized, as a single window."""
        self._require(output)
        run = _Run(self, tokenized, output)
        try:
            run.begin()
            return run.finish(no_progress)
        finally:
            run.cancel()

    def run_together(self, texts: Sequence[Text]) -> Array:
        """Return the model's first output for all `texts` in one batch, padded to the longest.

        `run` never does this, except in packed rows. It serves to show that batching makes no
        difference to the vectors.
        """
        return self.run_all(self.tokenizer(texts), self.backend.outputs[:1])[0][0]

    def run_all(
        self,
        tokenized: TokenizedTexts,
        outputs: Sequence[str],
        *,
        length: int | None = None,
        prompt_length: int = 0,
        backend: Backend | None = None,
        alone: bool = False,
    ) -> tuple[list[Array], int]:
        """Run all texts in one batch, padded to `length` tokens, by default the longest text's.

        Where texts are packed, they run in as many batches as that takes. Returns the `outputs`,
        each [texts, ...], and the number of tokens that ran. `backend` is the pipeline's own if it
        is not given.
        """
        backend = backend or self.backend
        if backend.packer is None:
            rows = PaddedRows(np.arange(len(tokenized.lengths)), length or int(tokenized.lengths.max()))
            batch = self.make_batch(tokenized, rows, prompt_length)
            return backend.run(batch, outputs, alone=alone), rows.tokens
        packed = backend.packer.pack(tokenized.lengths, backend.max_batch_tokens)
        found = [backend.run(self.make_batch(tokenized, rows, prompt_length), outputs) for rows in packed]
        order = np.argsort(np.concatenate([rows.texts for rows in packed]))
        joined = [np.concatenate(values)[order] for values in zip(*found, strict=True)]
        return joined, sum(rows.tokens for rows in packed)

    def cut(self, lengths: Indices, max_batch_tokens: int, max_batch_texts: int | None = None) -> Sequence[Rows]:
        """Return which texts of these lengths run together, as the backend needs it."""
        if self.backend.packer is not None:
            return self.backend.packer.pack(lengths, max_batch_tokens, max_batch_texts)
        multiple, longest = self.backend.length_multiple, self.tokenizer.max_length
        return cut_batches(lengths, max_batch_tokens, max_batch_texts, multiple, longest)

    def make_batch(self, tokenized: TokenizedTexts, rows: Rows, prompt_length: int = 0) -> Batch:
        """Return a batch of some texts, packed, or padded on the model's padding side."""
        if isinstance(rows, PaddedRows):
            padded = tokenized.padded(rows.texts, rows.length, self._pad_id, self._padding_side)
            return Batch(*padded, prompt_length)
        return packed_batch(tokenized, rows, self._pad_id, prompt_length)

    def refuse_truncation(
        self, tokenized: TokenizedTexts, inverse: Indices | None, output: Output, start: int = 0
    ) -> None:
        """Raise if a text was truncated. The first text is number `start` of the call."""
        if tokenized.cut():
            first = int((tokenized.truncated if inverse is None else tokenized.truncated[inverse]).argmax())
            limit = output.max_length or self.tokenizer.max_length
            raise TruncationError(start + first, limit, noun=self.noun, texts=tokenized.cut(inverse))

    def submit(self, function: Callable[..., Any], *args: object) -> Future[Any]:
        """Run `function` in a worker thread.

        The threads are started at first use, and again after a fork, which they do not survive.
        """
        with self._lock:
            if self._closed:
                raise EngineError(CLOSED)
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

    def _require(self, output: Output) -> None:
        if missing := [name for name in output.names if name not in self.backend.outputs]:
            what = f"{self.backend.describe()} gives no {', '.join(missing)}"
            raise EngineError(f"{what}: use Engine(..., device='cpu')")


class _Run:
    """One window of texts while its batches run."""

    def __init__(
        self,
        pipeline: Pipeline,
        tokenized: TokenizedTexts,
        output: Output,
        prompt_length: int = 0,
        start: int = 0,
        inverse: Indices | None = None,  # the row of each text, if identical texts share a row
    ) -> None:
        self._pipeline, self._tokenized, self._output = pipeline, tokenized, output
        self._prompt_length, self._start, self._inverse = prompt_length, start, inverse
        self._collector: Collector = output.collect(tokenized)
        self._batches: Sequence[Rows] = []
        self._futures: list[Future[int]] = []
        self._bad: list[int] = []  # rows with NaN or infinity

    def begin(self, max_batch_texts: int | None = None, is_wanted: Callable[[], bool] | None = None) -> None:
        """Submit the batches to the workers; run a single batch here, which takes less time."""
        limits = [most for most in (max_batch_texts, self._output.max_batch_texts) if most is not None]
        backend = self._pipeline.backend
        budget = backend.max_batch_tokens if is_wanted else self._budget()
        self._batches = self._pipeline.cut(self._tokenized.lengths, budget, min(limits, default=None))
        if is_wanted is not None:
            for batch in self._batches:
                if not is_wanted():
                    raise EngineError("the caller is gone")
                self._run_batch(batch)
        elif len(self._batches) == 1:
            self._run_batch(self._batches[0], alone=True)
        else:
            self._futures = [self._pipeline.submit(self._run_batch, batch) for batch in self._batches]

    def finish(self, progress: Progress) -> Window:
        """Wait for all batches and return their output."""
        done = 0
        finished: SimpleQueue[Future[int]] = SimpleQueue()
        for future in self._futures:
            future.add_done_callback(finished.put)
        for _ in self._futures:
            # Not `as_completed`, which waits for ever for a future that a shutdown has cancelled.
            future = finished.get()
            if future.cancelled():
                raise EngineError(CLOSED)
            done += future.result()
            progress(future.result())
        stats = self._stats()
        progress(stats.texts - done)
        if self._bad and self._pipeline.backend.packer is not None:
            self._run_alone()
            stats = self._stats()
        self._check_finite()
        return Window(self._start, self._collector.result(self._inverse), stats)

    def cancel(self) -> None:
        """Drop batches that have not started, and wait for the others."""
        # Do not wait for cancelled futures: after the executor's shutdown they never become done.
        wait([future for future in self._futures if not future.cancel()])

    def _run_batch(self, rows: Rows, alone: bool = False) -> int:
        pipeline = self._pipeline
        batch = pipeline.make_batch(self._tokenized, rows, self._prompt_length)
        bad = self._collector.put(rows.texts, pipeline.backend.run(batch, self._output.names, alone=alone))
        self._bad += bad.tolist()
        return len(rows.texts)

    def _run_alone(self) -> None:
        """Run texts without finite vectors once more, each alone: one spoils those in its row."""
        again, self._bad = self._bad, []
        for text in again:
            (rows,) = self._pipeline.cut(self._tokenized.lengths[[text]], self._pipeline.backend.max_batch_tokens)
            rows = replace(rows, texts=np.array([text]))
            self._run_batch(rows)
            self._batches = [*self._batches, rows]

    def _budget(self) -> int:
        """Return the tokens per batch: the backend's best, or less to give every worker a share."""
        backend = self._pipeline.backend
        if backend.workers == 1:
            return backend.max_batch_tokens
        share = -(-int(self._tokenized.lengths.sum()) // backend.workers)
        return min(backend.max_batch_tokens, max(share, backend.min_batch_tokens))

    def _check_finite(self) -> None:
        if self._bad:
            rows = np.array(self._bad)
            bad = rows if self._inverse is None else np.flatnonzero(np.isin(self._inverse, rows))
            first, noun = int(bad.min()) + self._start, self._pipeline.noun
            message = f"the model gives NaN or infinity for {noun} {first} ({len(bad)} in all)"
            raise TextError(message, first, not_finite=True)

    def _stats(self) -> EncodeStats:
        lengths, inverse = self._tokenized.lengths, self._inverse
        return EncodeStats(
            texts=len(lengths) if inverse is None else len(inverse),
            unique_texts=len(lengths),
            truncated=self._tokenized.cut(inverse),
            tokens=self._tokenized.tokens(),
            padded_tokens=sum(batch.tokens for batch in self._batches),
            batches=len(self._batches),
        )


def packed_batch(tokenized: TokenizedTexts, rows: PackedRows, pad_id: int, prompt_length: int = 0) -> Batch:
    """Return a batch of some texts, packed."""
    ids, segments, positions = tokenized.packed(rows, pad_id)
    starts, ends = np.zeros((2, rows.shape.rows, rows.shape.segments), np.int64)
    ends[rows.rows, rows.segments] = rows.columns + tokenized.lengths[rows.texts]
    starts[rows.rows, rows.segments] = rows.columns + prompt_length
    places = rows.rows * rows.shape.segments + rows.segments
    packing = Packing(segments, positions, np.minimum(starts, ends), ends, places)
    return Batch(ids, (segments > 0).astype(np.int64), None, prompt_length, packing)


def unique_texts(texts: list[Item]) -> tuple[list[Item], Indices | None]:
    """Return each text once, and the index of each original among those; None if all differ."""
    if len(texts) == 1:
        return texts, None
    places = dict(zip(dict.fromkeys(texts), range(len(texts)), strict=False))
    if len(places) == len(texts):
        return texts, None
    return list(places), np.fromiter((places[text] for text in texts), np.int64, len(texts))
