"""The queue of calls: texts are tokenized, queued, run by workers, and dropped if abandoned."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from sbert_infer.backends.base import CLOSED, Backend
from sbert_infer.encode.output import Indices
from sbert_infer.encode.pipeline import Pipeline, unique_texts
from sbert_infer.errors import DeadlineError, EngineError, OverloadedError, WorkerError
from sbert_infer.scheduling.call import Call, CallOptions, Deadlines, guess_tokens
from sbert_infer.scheduling.lane import Lane
from sbert_infer.scheduling.limits import Limits
from sbert_infer.scheduling.scheduler import Scheduler
from sbert_infer.scheduling.stats import TOTALS, AsyncStats, CallCounts, LaneStats
from sbert_infer.scheduling.tokenizer_pool import TokenizerPool
from sbert_infer.scheduling.workers import Workers
from sbert_infer.text.tokenizer import TokenizedTexts, Tokenizer
from sbert_infer.types import INTERACTIVE, Encoded, Observe, Priority, Text


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
            hang_timeout_s: a full batch that runs longer than this is given up.
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
        guess = self._guess(unique, options)
        options = self._with_priority(options, guess_tokens(unique, options.prompt), len(unique))
        little = not options.other_side and self.tokenizers.is_little(unique, options.prompt)
        if little:  # the next free worker tokenizes them
            return await self._run(unique, inverse, options, arrival, guess=guess)
        with self._reserved(guess, options):
            tokenized, skip = await self.tokenizers.tokenize(unique, options)
        self._check_truncation(tokenized, inverse, options)
        self._observe("tokenize", time.monotonic() - arrival)
        return await self._run(tokenized, inverse, options, arrival, prompt_length=skip)

    async def encode_tokens(self, ids: Sequence[Sequence[int]], options: CallOptions, arrival: float) -> Encoded:
        """Encode at least one text, given as token ids."""
        options = self._with_priority(options, sum(map(len, ids)), len(ids))
        tokenized = await self.tokenizers.check(ids, options)
        self._check_truncation(tokenized, None, options)
        return await self._run(tokenized, None, options, arrival)

    def refusal(self, priority: Priority | None, key: Hashable) -> OverloadedError | None:
        """Return the error that a text would get now in every lane that may be its own."""
        lanes = self.scheduler.lanes if priority is None else (priority,)
        refusals = [self._refusal(lane, key) for lane in lanes]
        return None if None in refusals else refusals[0]

    def _refusal(self, lane: Priority, key: Hashable) -> OverloadedError | None:
        try:
            self.scheduler.check(1, math.inf, time.monotonic(), lane, key)
        except OverloadedError as error:
            return error
        return None

    def stats(self, counts: CallCounts, *, ready: bool) -> AsyncStats:
        """Return the current counters and gauges."""
        scheduler, workers = self.scheduler, self.workers
        now = time.monotonic()
        with workers.changed:
            lanes = {
                priority: LaneStats(lane.queued_texts, lane.queued_tokens, lane.oldest_age(now))
                for priority, lane in scheduler.lanes.items()
            }
            return AsyncStats(
                ready=ready,
                lanes=lanes,
                queued_texts=scheduler.queued_texts,
                queued_tokens=scheduler.queued_tokens,
                oldest_age_s=scheduler.oldest_age(now),
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
        *,
        prompt_length: int = 0,
        guess: int = 0,
    ) -> Encoded:
        """Queue a call, whose priority is known, and wait for its result."""
        call = Call(
            content, inverse, options, arrival=arrival, prompt_length=prompt_length, guess=guess, read=self._read
        )
        lane, held = self._check(call.tokens, options), call.tokens
        lane.hold(call.key, held)
        self.scheduler.add(call)
        self.workers.wake()
        self._calls.add(call)
        self._deadlines.note(call)
        try:
            if self.workers.problem:  # may be new, and this call too late to be failed with the others
                call.future.cancel()
                raise WorkerError(self.workers.problem, 1.0)
            encoded = await call.future
            self._observe(call.priority, time.monotonic() - arrival)
            return encoded
        except DeadlineError:
            self.scheduler.check_possible(call.tokens, call.deadline - call.arrival)
            raise
        finally:
            if not call.ended:
                self._drop(call)
            self._calls.discard(call)
            lane.release(call.key, held)

    def _read(self, texts: list[Text], inverse: Indices | None, options: CallOptions) -> tuple[TokenizedTexts, int]:
        """Tokenize a few texts. Called by a worker that holds the lock, so this must not block."""
        tokenized, skip = self.tokenizers.tokenize_little(texts, options.prompt)
        self._check_truncation(tokenized, inverse, options)
        return tokenized, skip

    def _drop(self, call: Call) -> None:
        with self.workers.changed:
            self.scheduler.drop(call)

    def _with_priority(self, options: CallOptions, tokens: int, texts: int) -> CallOptions:
        """Set the priority of a call with about so many tokens, uncut, unless it names one.

        Even what is cut must be tokenized.
        """
        return options._replace(priority=options.priority or self.scheduler.limits.priority_of(tokens, texts))

    def _check(self, tokens: int, options: CallOptions) -> Lane:
        """Return the lane of a call; raise if so many tokens can't run, or not in time."""
        if self._closed:
            raise EngineError(CLOSED)
        if self.workers.problem:
            raise WorkerError(self.workers.problem, 1.0)
        priority = options.priority or INTERACTIVE
        self.scheduler.check(tokens, options.deadline, time.monotonic(), priority, options.key)
        return self.scheduler.lanes[priority]

    @contextmanager
    def _reserved(self, tokens: int, options: CallOptions) -> Iterator[None]:
        """Reserve room in the queue for texts whose tokens are not counted yet."""
        lane = self._check(tokens, options)
        lane.reserved_tokens += tokens
        lane.hold(options.key, tokens)
        try:
            yield
        finally:
            lane.reserved_tokens -= tokens
            lane.release(options.key, tokens)

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
