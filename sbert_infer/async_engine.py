"""`AsyncEngine`: many callers, one engine. Their texts wait in one queue and run together."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import ENCODER, RERANKER, SPARSE_ENCODER, check_kind
from sbert_infer.encode.sparse import is_sparse, max_batch_texts
from sbert_infer.encode.tokens import TokenVectors, check_has_tokens, token_vectors
from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError, OverloadedError, TruncationError, warn
from sbert_infer.scheduling.call import CallOptions, within
from sbert_infer.scheduling.call_queue import CallQueue
from sbert_infer.scheduling.scheduler import Limits
from sbert_infer.text.inputs import as_list, as_pairs, as_texts, check_pairs, check_texts
from sbert_infer.types import Encoded, Observe, OnTruncate, Side, Text

__all__ = ["AsyncEngine", "AsyncStats"]

logger = logging.getLogger("sbert_infer")

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AsyncStats:
    """What an `AsyncEngine` has done, and what it is doing now."""

    ready: bool
    queued_texts: int  # that have not started
    queued_tokens: int
    oldest_age_s: float  # of the texts in the queue
    running_batches: int
    tokens_per_s: float | None  # under load, as measured
    requests: int  # all that follow are since the start
    texts: int
    tokens: int
    truncated: int  # texts
    batches: int
    batch_tokens: int  # tokens that ran; identical texts of one call run once
    padded_tokens: int  # the same, padding included
    restarts: int  # how often hung or dead workers were replaced
    errors: Mapping[str, int]  # calls that failed, by the name of the exception


class AsyncEngine:
    """Encodes texts for many concurrent callers of an asyncio program.

    >>> async with AsyncEngine("model.onnx") as engine:   # doctest: +SKIP
    ...     vectors = await engine.encode(["A cat sat."])

    Vectors are those of `Engine.encode`. Batches are formed across callers, from texts of like
    length. All calls are to come from one event loop, and from the process that opened the engine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Engine,
        *,
        max_batch_tokens: int | None = None,
        max_queue_tokens: int = 2**20,
        max_delay_ms: float = 2.0,
        max_wait_s: float = 1.0,
        timeout_s: float = 30.0,
        hang_timeout_s: float = 20.0,
        observe: Observe = lambda name, value: None,
    ) -> None:
        """Open `model` and start the workers. Takes as long as opening an `Engine`.

        Args:
            model: a file written by `sbert-export`, or an engine, which is then not closed with
                this one.
            max_batch_tokens: tokens that run together, padding included; the backend's best by
                default.
            max_queue_tokens: tokens that may wait. A call beyond that is refused at once.
            max_delay_ms: how long a batch that is not full may wait for more texts while others
                run.
            max_wait_s: a call that would wait for longer than this is refused at once, if hundreds
                of others wait, or did in the last ten seconds.
            timeout_s: how long a call may take, if it does not say so itself.
            hang_timeout_s: a batch that runs for longer than this is given up, and what runs it is
                replaced.
            observe: called from several threads, as `observe(name, value)`, with the seconds that a
                call spent on "tokenize", "queue" (each batch it has a part in) and "total", and of
                each batch "run", its seconds, and "batch_tokens".

        """
        _check_positive(
            timeout_s=timeout_s,
            hang_timeout_s=hang_timeout_s,
            max_queue_tokens=max_queue_tokens,
            max_wait_s=max_wait_s,
        )
        if max_delay_ms < 0:
            raise ValueError(f"max_delay_ms must be at least 0, got {max_delay_ms}")
        self._owns = not isinstance(model, Engine)
        self.engine = model if isinstance(model, Engine) else _AnyEngine(model, max_batch_tokens=max_batch_tokens)
        check_kind(self.engine._artifact, _AnyEngine._kinds, _AnyEngine._name)
        self.timeout_s = timeout_s
        self._observe = _guarded(observe)
        self._pipeline = self.engine._open()
        backend = self._pipeline.backend
        if max_batch_tokens is not None and not 1 <= max_batch_tokens <= backend.max_batch_tokens:
            raise ValueError(f"max_batch_tokens must be 1 to {backend.max_batch_tokens}, the engine's own")
        budget = max_batch_tokens or backend.max_batch_tokens
        limits = Limits(
            max_batch_tokens=budget,
            min_batch_tokens=min(budget, backend.min_batch_tokens),
            workers=backend.workers,
            max_length=self.engine.manifest.max_length,
            max_batch_texts=max_batch_texts(self.engine.manifest) if is_sparse(self.engine.manifest) else None,
            edges=backend.edges,
            max_queue_tokens=max_queue_tokens,
            max_delay_s=max_delay_ms / 1000,
            max_wait_s=max_wait_s,
        )
        self._queue = CallQueue(self.engine, limits, hang_timeout_s=hang_timeout_s, observe=self._observe)
        self._token_thread = ThreadPoolExecutor(1, thread_name_prefix="sbert-infer-tokens")
        self._active = 0  # calls from their first to their last line
        self._closing = False  # no new calls
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()

    async def encode(
        self,
        texts: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        on_truncate: OnTruncate | None = None,
        timeout_s: float | None = None,
    ) -> Vectors:
        """Encode one text or many, as `Engine.encode` does. Cancelling drops what has not started.

        Raises `OverloadedError` at once if the queue is full or too long for the timeout,
        `DeadlineError` after `timeout_s`, `TextError` if the model fails on one of the texts, and
        `WorkerError` if it can't run for now.
        """
        encoded = await self.encode_counted(
            texts,
            prompt_name,
            prompt,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            on_truncate=on_truncate,
            timeout_s=timeout_s,
        )
        vectors: Vectors = encoded.vectors
        return vectors

    async def encode_counted(
        self,
        texts: str | Iterable[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        on_truncate: OnTruncate | None = None,
        truncation_side: Side | None = None,
        timeout_s: float | None = None,
    ) -> Encoded:
        """As `encode`, with the number of tokens and of truncated texts.

        `truncation_side` says where long texts are cut, if not where the model was trained to have
        it.
        """
        arrival = time.monotonic()
        self._require(ENCODER, "predict_counted")
        prompt = self.engine._resolve_prompt(prompt, prompt_name)
        options = self._options(
            arrival, prompt, on_truncate, truncation_side, timeout_s, truncate_dim, normalize_embeddings
        )
        source, single = as_texts(texts)
        known: list[Text] = list(source)
        check_texts(known)
        encoded = await self._encode(known, options, arrival)
        return Encoded(encoded.vectors[0], encoded.tokens, encoded.truncated) if single else encoded

    async def encode_tokens(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        on_truncate: OnTruncate | None = None,
        truncation_side: Side | None = None,
        timeout_s: float | None = None,
    ) -> Encoded:
        """As `encode_counted`, for texts that this model's own tokenizer has tokenized, special tokens included."""
        arrival = time.monotonic()
        self._require(ENCODER, "predict_counted")
        options = self._options(
            arrival, "", on_truncate, truncation_side, timeout_s, truncate_dim, normalize_embeddings
        )
        with _Counted(self, len(token_ids), arrival):
            if not len(token_ids):
                return self._nothing()
            encoded = await self._queue.encode_tokens(token_ids, options, arrival)
            self._note(encoded, len(token_ids), options)
        return encoded

    async def predict_counted(
        self,
        pairs: Iterable[Any],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        on_truncate: OnTruncate | None = None,
        truncation_side: Side | None = None,
        timeout_s: float | None = None,
    ) -> Encoded:
        """The scores of pairs of texts as a reranker gives them, before any activation: [pairs, labels].

        For many callers what `Reranker.predict` is for one. Raises as `encode` does.
        """
        arrival = time.monotonic()
        self._require(RERANKER, "encode")
        prompt = self.engine._resolve_prompt(prompt, prompt_name)
        options = self._options(arrival, prompt, on_truncate, truncation_side, timeout_s)
        items, _ = as_pairs(pairs)
        check_pairs(items)
        return await self._encode([(first, second) for first, second in items], options, arrival)

    async def encode_sparse(
        self,
        texts: Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        on_truncate: OnTruncate | None = None,
        truncation_side: Side | None = None,
        timeout_s: float | None = None,
    ) -> Encoded:
        """The vectors of a sparse encoder, which are `SparseRows`: see `to_csr`. Raises as `encode` does."""
        arrival = time.monotonic()
        self._require(SPARSE_ENCODER, "encode")
        prompt = self.engine._resolve_prompt(prompt, prompt_name)
        options = self._options(arrival, prompt, on_truncate, truncation_side, timeout_s)
        return await self._encode([*as_list(texts, "encode_sparse")], options, arrival)

    async def token_vectors(
        self,
        texts: Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        on_truncate: OnTruncate | None = None,
        truncation_side: Side | None = None,
        timeout_s: float | None = None,
        max_tokens: int | None = None,
    ) -> TokenVectors:
        """A vector for each token, if the artifact has them. One call at a time, beside the queue, and never in it."""
        arrival = time.monotonic()
        self._require(ENCODER, "predict_counted")
        check_has_tokens(self.engine.manifest)
        prompt = self.engine._resolve_prompt(prompt, prompt_name)
        options = self._options(arrival, prompt, on_truncate, truncation_side, timeout_s)
        texts = as_list(texts, "token_vectors")
        left = threading.Event()

        def work() -> TokenVectors:
            return token_vectors(
                self._pipeline,
                texts,
                prompt,
                tokenizer=self._queue.tokenizers.tokenizer(options.other_side),
                allow_truncation=options.on_truncate != "error",
                max_tokens=max_tokens,
                is_wanted=lambda: not left.is_set(),
            )

        with _Counted(self, len(texts), arrival):
            try:
                # A thread of its own: those who left keep it busy for no longer than a batch.
                future = asyncio.get_running_loop().run_in_executor(self._token_thread, work)
                found = await within(future, options.deadline)
            finally:
                left.set()
            self._note(found, len(texts), options)
        return found

    @property
    def ready(self) -> bool:
        """Whether calls are taken, and workers are there to run them, none of which seems to hang."""
        return not self._closing and self._queue.workers.ready

    def refusal(self) -> OverloadedError | None:
        """What a call for one short text would get now, if the queue is too long for it; `count_refusal` if it does."""
        try:
            self._queue.scheduler.check(1, math.inf, time.monotonic())
        except OverloadedError as error:
            return error
        return None

    def count_refusal(self, error: OverloadedError) -> None:
        """A call was refused in advance: it counts as any that was refused here."""
        self._counts["requests"] += 1
        self._errors[type(error).__name__] += 1

    def stats(self) -> AsyncStats:
        """Counters and gauges, as of now."""
        scheduler, workers = self._queue.scheduler, self._queue.workers
        with workers.changed:
            return AsyncStats(
                ready=self.ready,
                queued_texts=scheduler.queued_texts,
                queued_tokens=scheduler.queued_tokens,
                oldest_age_s=scheduler.oldest_age(time.monotonic()),
                running_batches=len(scheduler.running),
                tokens_per_s=scheduler.tokens_per_s,
                **{name: self._counts[name] for name in ("requests", "texts", "tokens", "truncated")},
                batches=scheduler.batches,
                batch_tokens=scheduler.batch_tokens,
                padded_tokens=scheduler.padded_tokens,
                restarts=workers.restarts,
                errors=dict(self._errors),
            )

    async def close(self, drain_s: float = 10.0) -> None:
        """Take no more calls, give those under way `drain_s` to end, fail the rest, stop. Again does nothing."""
        if self._closing:
            return
        self._closing = True
        until = time.monotonic() + drain_s
        while self._active and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._token_thread.shutdown(wait=False, cancel_futures=True)
        await self._queue.close(until)
        if self._owns and not self._queue.scheduler.running:  # what still runs would be waited for
            await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncEngine({self.engine!r})"

    def _options(
        self,
        arrival: float,
        prompt: str,
        on_truncate: OnTruncate | None,
        side: Side | None,
        timeout_s: float | None,
        truncate_dim: int | None = None,
        normalize: bool = False,
    ) -> CallOptions:
        """What a caller asks for, with the defaults filled in."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        _check_positive(timeout_s=timeout_s)
        on_truncate = self.engine.on_truncate if on_truncate is None else on_truncate
        if on_truncate not in ("warn", "error", "ignore"):
            raise ValueError(f"on_truncate must be 'warn', 'error' or 'ignore', got {on_truncate!r}")
        if side not in (None, "left", "right"):
            raise ValueError(f"truncation_side must be 'left', 'right' or None, got {side!r}")
        if self._closing:
            raise EngineError("this engine is closed")
        dim = self.engine._resolve_dim(truncate_dim)
        other_side = side is not None and side != self.engine.manifest.truncation_side
        return CallOptions(prompt, dim, normalize, on_truncate, arrival + timeout_s, other_side)

    def _require(self, kind: str, right: str) -> None:
        found = self.engine.manifest.kind
        if found != kind:
            what = {RERANKER: "a reranker", SPARSE_ENCODER: "a sparse encoder"}.get(found, "a sentence encoder")
            right = "encode_sparse" if found == SPARSE_ENCODER else right
            raise EngineError(f"{self.engine.manifest.name} is {what}: use {right}")

    async def _encode(self, texts: list[Text], options: CallOptions, arrival: float) -> Encoded:
        with _Counted(self, len(texts), arrival):
            if not texts:
                return self._nothing()
            encoded = await self._queue.encode(texts, options, arrival)
            self._note(encoded, len(texts), options)
        return encoded

    def _nothing(self) -> Encoded:
        """What no texts give."""
        dense = self.engine.manifest.kind == ENCODER  # whose `encode` gives an array of one dimension then
        return Encoded(np.empty(0, np.float32) if dense else self._queue.make_rows(0), 0, 0)

    def _note(self, encoded: Encoded | TokenVectors, texts: int, options: CallOptions) -> None:
        """Count what a call has done, and warn if texts were cut and nobody has said what is to be done then."""
        self._counts["tokens"] += encoded.tokens
        self._counts["truncated"] += encoded.truncated
        if encoded.truncated and options.on_truncate == "warn":
            limit, noun = self._pipeline.tokenizer.max_length, self._pipeline.noun
            cut = f"{encoded.truncated} of {texts} {noun}s were cut to {limit} tokens"
            warn(f"{cut}; see AsyncEngine.encode(on_truncate=...)")


class _Counted:
    """A context that counts a call of so many texts, and its error. No generator: that takes three times as long."""

    __slots__ = ("_arrival", "_engine")

    def __init__(self, engine: AsyncEngine, texts: int, arrival: float) -> None:
        self._engine, self._arrival = engine, arrival
        engine._counts["requests"] += 1
        engine._counts["texts"] += texts

    def __enter__(self) -> None:
        self._engine._active += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        engine = self._engine
        engine._active -= 1
        engine._observe("total", time.monotonic() - self._arrival)
        if kind is not None:
            engine._errors[kind.__name__] += 1
        if isinstance(error, TruncationError):
            engine._counts["truncated"] += error.texts


class _AnyEngine(Engine):
    """For an artifact of either kind."""

    _kinds, _name = (ENCODER, RERANKER, SPARSE_ENCODER), "AsyncEngine"


def _guarded(observe: Observe) -> Observe:
    """`observe`, whose errors are logged: they may not end a worker."""

    def call(name: str, value: float) -> None:
        try:
            observe(name, value)
        except Exception:
            logger.exception("observe(%r, %r) failed", name, value)

    return call


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be more than 0, got {value}")
