"""`AsyncEngine`: one engine for many callers, whose texts share one queue and run together."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.exports import open_model
from sbert_infer.artifact.manifest import ENCODER, RERANKER, SPARSE_ENCODER, Artifact, check_kind, check_one_route
from sbert_infer.base_engine import BaseEngine
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.encode.output import Output
from sbert_infer.encode.self_check import Verify
from sbert_infer.encode.sparse import SparseOutput
from sbert_infer.encode.tokens import TokensOutput
from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError, OverloadedError, warn
from sbert_infer.opening import Compute
from sbert_infer.reranker import Reranker
from sbert_infer.scheduling.call import CallOptions
from sbert_infer.scheduling.call_queue import CallQueue
from sbert_infer.scheduling.limits import Limits, check_not_negative, check_positive
from sbert_infer.scheduling.stats import AsyncStats, CallCounts
from sbert_infer.scheduling.token_calls import TokenCalls
from sbert_infer.scheduling.vector_cache import Run, VectorCache
from sbert_infer.scheduling.warmup import warm_up
from sbert_infer.text.inputs import as_list, as_pairs, as_texts, check_on_truncate, check_pairs, check_texts
from sbert_infer.types import Encoded, Observe, OnTruncate, Priority, Side, Text

Vectors = npt.NDArray[np.float32]


class AsyncEngine:
    """Encodes texts for many concurrent callers of an asyncio program.

    >>> async with AsyncEngine("model.onnx") as engine:   # doctest: +SKIP
    ...     vectors = await engine.encode(["A cat sat."])

    The vectors are those of `Engine.encode`. Batches are formed across callers, from texts of
    similar length. All calls must come from one event loop, in the process that opened the engine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Artifact | BaseEngine,
        *,
        workers: int | None = None,
        max_batch_tokens: int | None = None,
        max_queue_tokens: int = 2**20,
        max_delay_ms: float = 2.0,
        max_wait_s: float = 1.0,
        timeout_s: float = 30.0,
        hang_timeout_s: float = 20.0,
        verify: Verify | None = None,
        compute: Compute | None = None,
        cache_mb: float = 0.0,
        observe: Observe = lambda name, value: None,
    ) -> None:
        """Open `model` and start the workers. Takes as long as opening an `Engine`.

        Args:
            model: what `Engine` opens, or an open engine, which the caller must close.
            workers: batches at once on a CPU; by default one for each core. Not for an open engine.
            max_batch_tokens: tokens that run together, padding included; by default, what is
                fastest on the backend.
            max_queue_tokens: tokens that may wait. A call that would exceed this is refused.
            max_delay_ms: how long a batch that is not full may wait for more texts while other
                batches run.
            max_wait_s: a call that would wait longer than this is refused at once, if hundreds of
                others are waiting or were within the last ten seconds.
            timeout_s: how long a call may take, unless it sets its own timeout.
            hang_timeout_s: a batch that runs longer than this is given up, and the worker and
                backend that run it are replaced. A text of n times `max_batch_tokens` has n times
                as long.
            verify: when to check the vectors of this machine, as for `Engine`. Not for an open one.
            compute: "auto" for what `sbert-tune` has chosen, as for `Engine`. Not for an open one.
            cache_mb: memory for vectors of texts that a sentence encoder has encoded before.
            observe: called from several threads, as `observe(name, value)`. For each call it gets
                the seconds of "tokenize", "queue" (once for each batch with its texts), "total" and
                "interactive" or "bulk"; for each batch those of "run", and its "batch_tokens".

        """
        check_positive(
            timeout_s=timeout_s, hang_timeout_s=hang_timeout_s, max_queue_tokens=max_queue_tokens, max_wait_s=max_wait_s
        )
        check_not_negative(max_delay_ms=max_delay_ms, cache_mb=cache_mb)
        self._owns = not isinstance(model, BaseEngine)
        own: dict[str, Any] = {"workers": workers, "verify": verify, "compute": compute}
        own = {name: value for name, value in own.items() if value is not None}
        if own and not self._owns:
            raise ValueError(f"an open engine has its {min(own)}: give them to Engine or Reranker, not to AsyncEngine")
        artifact = model.artifact if isinstance(model, BaseEngine) else open_model(model)
        check_kind(artifact, (ENCODER, RERANKER, SPARSE_ENCODER), "AsyncEngine")
        check_one_route(artifact, "AsyncEngine and sbert-serve")
        if not isinstance(model, BaseEngine):
            opener = Reranker if artifact.manifest.kind == RERANKER else Engine
            model = opener(artifact, max_batch_tokens=max_batch_tokens, **own)
        self.engine, self.timeout_s = model, timeout_s
        self._pipeline, manifest = model.pipeline, model.manifest
        # The output of calls that do not ask for fewer dimensions or unit length.
        dims = getattr(self.engine, "max_active_dims", None)  # of a sparse encoder
        self._output = SparseOutput(manifest, dims) if manifest.kind == SPARSE_ENCODER else DenseOutput(manifest)
        self.cache = VectorCache(cache_mb, manifest) if cache_mb and manifest.kind == ENCODER else None
        self._counts = CallCounts(observe)
        limits = Limits.of(
            self._pipeline.backend,
            max_batch_tokens,
            max_length=max(manifest.max_length, self.engine.max_seq_length),
            max_batch_texts=self._output.max_batch_texts,
            max_queue_tokens=max_queue_tokens,
            max_delay_s=max_delay_ms / 1000,
            max_wait_s=max_wait_s,
        )
        self._queue = CallQueue(
            self._pipeline,
            limits,
            outputs=self._output.names,
            include_prompt=manifest.include_prompt,
            replace_backend=self.engine.replace_backend,
            tokenizer_of_other_side=self.engine.tokenizer_of_other_side,
            hang_timeout_s=hang_timeout_s,
            observe=self._counts.observe,
        )
        self._token_calls = TokenCalls(self._pipeline, self._queue.tokenizers.tokenizer)
        self._closing = False  # if True, new calls are refused

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
        priority: Priority | None = None,
        key: Hashable = None,
    ) -> Vectors:
        """Encode one text or many, as `Engine.encode` does.

        Cancelling drops texts that have not started. Raises `OverloadedError` at once if the queue
        is full or too long for the timeout, `CallTooLargeError` if neither the queue nor the
        timeout could hold so many tokens, `DeadlineError` after `timeout_s`, `TextError` if the
        model fails on one of the texts, and `WorkerError` if it can't run for now.

        An "interactive" call goes before "bulk" ones; by default it is one text that fits into a
        batch, or several that fit into a quarter. Each `key` has an equal share of either.
        """
        encoded = await self.encode_counted(
            texts,
            prompt_name,
            prompt,
            normalize_embeddings=normalize_embeddings,
            truncate_dim=truncate_dim,
            on_truncate=on_truncate,
            timeout_s=timeout_s,
            priority=priority,
            key=key,
        )
        return np.asarray(encoded.vectors, np.float32)

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
        priority: Priority | None = None,
        key: Hashable = None,
    ) -> Encoded:
        """Encode as `encode` does, and also return the number of tokens and of truncated texts.

        `truncation_side` is the end at which long texts are cut; by default, the one that the model
        was trained with.
        """
        arrival = time.monotonic()
        output = self._dense(truncate_dim, normalize_embeddings)
        how = self._call(arrival, output, prompt, prompt_name, on_truncate, truncation_side, timeout_s, priority, key)
        source, single = as_texts(texts)
        known: list[Text] = list(source)
        check_texts(known)
        encoded = await self._encode(known, how, arrival)
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
        priority: Priority | None = None,
        key: Hashable = None,
    ) -> Encoded:
        """Encode texts given as token ids of this model's tokenizer, special tokens included."""
        arrival = time.monotonic()
        output = self._dense(truncate_dim, normalize_embeddings)
        how = self._call(arrival, output, "", None, on_truncate, truncation_side, timeout_s, priority, key)
        with self._counts.call(len(token_ids), arrival):
            if not len(token_ids):
                return self._nothing()
            encoded = await self._queue.encode_tokens(token_ids, how, arrival)
            self._done(encoded, len(token_ids), how)
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
        priority: Priority | None = None,
        key: Hashable = None,
    ) -> Encoded:
        """Return a reranker's scores for pairs of texts, [pairs, labels], before any activation.

        This is the counterpart of `Reranker.predict` for many callers. Raises as `encode` does.
        """
        arrival = time.monotonic()
        output = self._require(RERANKER, "encode")
        how = self._call(arrival, output, prompt, prompt_name, on_truncate, truncation_side, timeout_s, priority, key)
        items, _ = as_pairs(pairs)
        check_pairs(items)
        return await self._encode([(first, second) for first, second in items], how, arrival)

    async def encode_sparse(
        self,
        texts: Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        *,
        on_truncate: OnTruncate | None = None,
        truncation_side: Side | None = None,
        timeout_s: float | None = None,
        priority: Priority | None = None,
        key: Hashable = None,
    ) -> Encoded:
        """Return the vectors of a sparse encoder as `SparseRows`. Raises as `encode` does."""
        arrival = time.monotonic()
        output = self._require(SPARSE_ENCODER, "encode")
        how = self._call(arrival, output, prompt, prompt_name, on_truncate, truncation_side, timeout_s, priority, key)
        return await self._encode([*as_list(texts, "encode_sparse")], how, arrival)

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
    ) -> Encoded:
        """Return a vector for each token, if the artifact has token vectors.

        These calls run one at a time in a thread of their own, not in the queue.
        """
        arrival = time.monotonic()
        self._require(ENCODER, "predict_counted")
        output = TokensOutput(self.engine.manifest, max_tokens=max_tokens)
        how = self._call(arrival, output, prompt, prompt_name, on_truncate, truncation_side, timeout_s)
        texts = as_list(texts, "token_vectors")
        with self._counts.call(len(texts), arrival):
            encoded = await self._token_calls.encode(texts, how)
            self._done(encoded, len(texts), how)
        return encoded

    def warm_up(self) -> None:
        """Run batches of all sizes, so that no caller meets one that runs for the first time."""
        warm_up(self._pipeline, self._output.names, self._queue.scheduler.limits)

    @property
    def ready(self) -> bool:
        """Whether calls are accepted and there are workers, none of which seems to hang."""
        return not self._closing and self._queue.workers.ready

    def refusal(self, priority: Priority | None = None, key: Hashable = None) -> OverloadedError | None:
        """Return the error that a call for one short text would get now, None if it would run.

        Without a priority, its texts may make it bulk: then both queues must be full.
        If the call is then refused with this error, report it with `count_refusal`.
        """
        return self._queue.refusal(priority, key)

    def count_refusal(self, error: OverloadedError) -> None:
        """Count a call that was refused because of `refusal`, like calls refused by the queue."""
        self._counts.refused(error)

    def stats(self) -> AsyncStats:
        """Return the current counters and gauges."""
        return self._queue.stats(self._counts, ready=self.ready)

    async def close(self, drain_s: float = 10.0) -> None:
        """Accept no more calls, wait up to `drain_s` for those under way, fail the rest, and stop.

        A second call does nothing.
        """
        if self._closing:
            return
        self._closing = True
        until = time.monotonic() + drain_s
        while self._counts.active and time.monotonic() < until:
            await asyncio.sleep(0.01)
        self._token_calls.close()
        await self._queue.close(until)
        if self._owns and not self._queue.scheduler.running:  # closing would wait for batches that still run
            await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncEngine({self.engine!r})"

    def _dense(self, truncate_dim: int | None, normalize: bool) -> Output:
        self._require(ENCODER, "predict_counted")
        engine: Any = self.engine  # an `Engine`: nothing else opens an encoder
        return DenseOutput(engine.manifest, engine.resolve_dim(truncate_dim), normalize=normalize)

    def _call(
        self,
        arrival: float,
        output: Output,
        prompt: str | None,
        prompt_name: str | None,
        on_truncate: OnTruncate | None,
        side: Side | None,
        timeout_s: float | None,
        priority: Priority | None = None,
        key: Hashable = None,
    ) -> CallOptions:
        """Check the arguments of a call and return them, with defaults filled in."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        check_positive(timeout_s=timeout_s)
        on_truncate = self.engine.on_truncate if on_truncate is None else on_truncate
        check_on_truncate(on_truncate)
        if side not in (None, "left", "right"):
            raise ValueError(f"truncation_side must be 'left', 'right' or None, got {side!r}")
        if self._closing:
            raise EngineError("this engine is closed")
        other_side = side not in (None, self.engine.manifest.truncation_side)
        prompt = self.engine.resolve_prompt(prompt, prompt_name)
        return CallOptions(prompt, output, on_truncate, arrival + timeout_s, other_side).sent_by(priority, key)

    def _require(self, kind: str, right: str) -> Output:
        found = self.engine.manifest.kind
        if found != kind:
            what = {RERANKER: "a reranker", SPARSE_ENCODER: "a sparse encoder"}.get(found, "a sentence encoder")
            right = "encode_sparse" if found == SPARSE_ENCODER else right
            raise EngineError(f"{self.engine.manifest.name} is {what}: use {right}")
        return self._output

    async def _encode(self, texts: list[Text], options: CallOptions, arrival: float) -> Encoded:
        with self._counts.call(len(texts), arrival):
            if not texts:
                return self._nothing()
            run: Run = self._queue.encode
            if self.cache is not None:
                run = partial(self.cache.encode, run, self._counts, self.engine.max_seq_length)
            encoded = await run(texts, options, arrival)
            self._done(encoded, len(texts), options)
        return encoded

    def _nothing(self) -> Encoded:
        """Return the result for no texts: if dense, an empty array [0], as from `Engine.encode`."""
        if self.engine.manifest.kind == ENCODER:
            return Encoded(np.empty(0, np.float32), 0, 0)
        return Encoded(self._output.collect(self._pipeline.tokenizer([])).result(None), 0, 0)

    def _done(self, encoded: Encoded, texts: int, options: CallOptions) -> None:
        """Count the tokens and truncated texts of a call, and warn about truncation if asked to."""
        self._counts.done(encoded)
        if encoded.truncated and options.on_truncate == "warn":
            cut, limit = f"{encoded.truncated} of {texts} {self._pipeline.noun}s", self._pipeline.tokenizer.max_length
            warn(f"{cut} were cut to {limit} tokens; see AsyncEngine.encode(on_truncate=...)")
