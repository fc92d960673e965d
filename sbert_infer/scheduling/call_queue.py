"""The queue of calls: texts are tokenized, queued, run by workers, and dropped if abandoned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sbert_infer.backends.base import CLOSED, Backend
from sbert_infer.encode.output import Indices
from sbert_infer.encode.pipeline import Pipeline, unique_texts
from sbert_infer.errors import DeadlineError, EngineError, WorkerError
from sbert_infer.scheduling.call import Call, CallOptions, Deadlines, guess_tokens
from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.scheduler import Scheduler
from sbert_infer.scheduling.stats import TOTALS, AsyncStats, CallCounts
from sbert_infer.scheduling.tokenizer_pool import TokenizerPool
from sbert_infer.scheduling.workers import Workers
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer
from sbert_infer.types import Encoded, Observe, Text


class CallQueue:
    """The queue of one engine and the threads that run it. Serves one event loop."""

    def __init__(
        self,
        pipeline: Pipeline,
        limits: Limits,
        *,
        outputs: Sequence[str],
        include_prompt: bool,
        replace_backend: Callable[[], Backend],
        tokenizer_of_other_side: Callable[[int], Tokenizer],
        hang_timeout_s: float,
        observe: Observe,
    ) -> None:
        """Start the workers.

        Args:
            pipeline: runs the texts.
            limits: the limits of batches and of the queue.
            outputs: names of the graph's outputs that every call needs.
            include_prompt: whether pooling includes the prompt's tokens.
            replace_backend: opens the model again, and returns the backend used until then.
            tokenizer_of_other_side: loads a tokenizer that cuts long texts at the opposite end.
            hang_timeout_s: a batch that runs longer than this is given up.
            observe: called with measurements.

        """
        self.scheduler = Scheduler(limits)
        self._pipeline, self._observe = pipeline, observe
        self.workers = Workers(
            self.scheduler, pipeline, outputs, replace_backend, hang_timeout_s=hang_timeout_s, observe=observe
        )
        self.tokenizers = TokenizerPool(pipeline, tokenizer_of_other_side, include_prompt=include_prompt)
        self._calls: set[Call] = set()
        self._deadlines = Deadlines(self._calls)
        self._closed = False

    async def encode(self, texts: list[Text], options: CallOptions, arrival: float) -> Encoded:
        """Encode at least one text, with the prompt of the options before each."""
        unique, inverse = unique_texts(texts)
        little = not options.other_side and self.tokenizers.is_little(unique, options.prompt)
        if little:  # the next free worker tokenizes them
            return await self._run(unique, inverse, options, arrival)
        with self._reserved(unique, options):
            tokenized, skip = await self.tokenizers.tokenize(
                unique, options.prompt, options.deadline, options.other_side
            )
        self._check_truncation(tokenized, inverse, options)
        self._observe("tokenize", time.monotonic() - arrival)
        return await self._run(tokenized, inverse, options, arrival, skip)

    async def encode_tokens(self, ids: Sequence[Sequence[int]], options: CallOptions, arrival: float) -> Encoded:
        """Encode at least one text, given as token ids."""
        tokenized = await self.tokenizers.check(ids, options.deadline, options.other_side)
        self._check_truncation(tokenized, None, options)
        return await self._run(tokenized, None, options, arrival)

    def stats(self, counts: CallCounts, *, ready: bool) -> AsyncStats:
        """Return the current counters and gauges."""
        scheduler, workers = self.scheduler, self.workers
        with workers.changed:
            return AsyncStats(
                ready=ready,
                queued_texts=scheduler.queued_texts,
                queued_tokens=scheduler.queued_tokens,
                oldest_age_s=scheduler.oldest_age(time.monotonic()),
                running_batches=len(scheduler.running),
                tokens_per_s=scheduler.tokens_per_s,
                **{name: counts.totals[name] for name in TOTALS},
                batches=scheduler.batches,
                batch_tokens=scheduler.batch_tokens,
                padded_tokens=scheduler.padded_tokens,
                restarts=workers.restarts,
                errors=dict(counts.errors),
            )

    async def close(self, until: float) -> None:
        """Fail all calls and stop; wait for running batches until `until`, at least a second."""
        self._closed = True
        for call in list(self._calls):
            self._drop(call)
            call.fail(EngineError(CLOSED))
        await asyncio.to_thread(self.tokenizers.close)
        await asyncio.to_thread(self.workers.stop, max(1.0, until - time.monotonic()))

    async def _run(
        self,
        content: TokenizedTexts | list[Text],
        inverse: Indices | None,
        options: CallOptions,
        arrival: float,
        prompt_length: int = 0,
    ) -> Encoded:
        """Queue a call and wait for its result."""
        call = Call(
            content,
            inverse,
            options,
            arrival=arrival,
            prompt_length=prompt_length,
            guess=0 if isinstance(content, TokenizedTexts) else self._guess(content, options),
            read=self._read,
        )
        self._check(call.tokens, call.deadline)
        self.scheduler.add(call)
        self.workers.wake()
        self._calls.add(call)
        self._deadlines.note(call)
        try:
            if self.workers.problem:  # may be new, and this call too late to be failed with the others
                call.future.cancel()
                raise WorkerError(self.workers.problem, 1.0)
            return await call.future
        except DeadlineError:
            self.scheduler.check_possible(call.tokens, call.deadline - call.arrival)
            raise
        finally:
            if not call.ended:
                self._drop(call)
            self._calls.discard(call)

    def _read(self, texts: list[Text], inverse: Indices | None, options: CallOptions) -> tuple[TokenizedTexts, int]:
        """Tokenize a few texts. Called by a worker that holds the lock, so this must not block."""
        tokenized, skip = self.tokenizers.tokenize_little(texts, options.prompt)
        self._check_truncation(tokenized, inverse, options)
        return tokenized, skip

    def _drop(self, call: Call) -> None:
        with self.workers.changed:
            self.scheduler.drop(call)

    def _check(self, tokens: int, deadline: float) -> None:
        """Raise if a call with so many tokens can't run, or not in time."""
        if self._closed:
            raise EngineError(CLOSED)
        if self.workers.problem:
            raise WorkerError(self.workers.problem, 1.0)
        self.scheduler.check(tokens, deadline, time.monotonic())

    @contextmanager
    def _reserved(self, texts: Sequence[Text], options: CallOptions) -> Iterator[None]:
        """Reserve room in the queue for texts whose tokens are not counted yet."""
        guess = self._guess(texts, options)
        self._check(guess, options.deadline)
        self.scheduler.reserved_tokens += guess
        try:
            yield
        finally:
            self.scheduler.reserved_tokens -= guess

    def _guess(self, texts: Sequence[Text], options: CallOptions) -> int:
        """Estimate the number of tokens: at least one per text, at most the size of the queue.

        A larger estimate would refuse the call for good.
        """
        limits = self.scheduler.limits
        guess = guess_tokens(texts, options.prompt, limits.max_length)
        return max(len(texts), min(guess, limits.max_queue_tokens))

    def _check_truncation(self, tokenized: TokenizedTexts, inverse: Indices | None, options: CallOptions) -> None:
        """Raise if a text was truncated and `on_truncate` is "error"."""
        if options.on_truncate == "error":
            self._pipeline.refuse_truncation(tokenized, inverse, options.output)
