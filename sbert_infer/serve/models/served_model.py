"""One served model: opened, called, and replaced when its file has changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import tokenizers

from sbert_infer._util.memory import give_back
from sbert_infer._util.threads import in_daemon_thread
from sbert_infer.artifact.exports import is_checkpoint, open_model
from sbert_infer.artifact.fingerprint import Fingerprint
from sbert_infer.artifact.manifest import ENCODER, RERANKER, SPARSE_ENCODER, Manifest
from sbert_infer.async_engine import AsyncEngine
from sbert_infer.errors import ArtifactError
from sbert_infer.scheduling.stats import TOTALS, AsyncStats
from sbert_infer.serve.settings import ModelFile, Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.types import Observe

_COUNTS = (*TOTALS, "batches", "batch_tokens", "padded_tokens", "restarts")

_KINDS = {
    ENCODER: "a sentence encoder: use /embed",
    RERANKER: "a reranker: use /rerank or /predict",
    SPARSE_ENCODER: "a sparse encoder: use /embed_sparse",
}
# What the texts of a request may be, in the words of NIM, Voyage, Cohere and Jina. Those with None
# get the prompt of the same name, if there is one.
INPUT_TYPES = {
    **dict.fromkeys(("query", "search_query", "retrieval.query", "code.query"), "query"),
    **dict.fromkeys(("document", "passage", "search_document", "retrieval.passage", "code.passage"), "document"),
    **dict.fromkeys(("classification", "clustering", "text-matching", "separation")),
}
_CLOSE_S = 2.0  # to free memory once calls have ended
_WARM_S = 600.0  # for the first texts, whatever the timeout of a request


class Model:
    """One artifact and its engine, which may be replaced while calls run."""

    fingerprint: Fingerprint  # of the artifact that serves now; set by `open`

    def __init__(self, name: str, file: ModelFile, settings: Settings, observe: Observe) -> None:
        self.name, self.path, self._expected = name, file.path, file.expected
        self.names = [name]  # under which it is served
        self.created = int(time.time())
        self.settings, self._observe = settings, observe
        self._engine: AsyncEngine | None = None
        self._tokenizer: tuple[AsyncEngine, tokenizers.Tokenizer] | None = None  # of that engine
        self._leaving: set[AsyncEngine] = set()  # replaced, with calls still to end
        self._past: Counter[str] = Counter()  # counts of closed engines
        self._past_errors: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def engine(self) -> AsyncEngine:
        """The engine that runs the model now."""
        if self._engine is None:
            raise Problem("model_unavailable", f"model {self.name} is closed", retry_after_s=1.0)
        return self._engine

    @property
    def is_open(self) -> bool:
        """Whether it has an engine."""
        return self._engine is not None

    @property
    def ready(self) -> bool:
        """Whether it takes calls."""
        return self._engine is not None and self._engine.ready

    @property
    def max_batch_tokens(self) -> int:
        """Tokens that may run together."""
        return self.settings.max_batch_tokens or int(self.engine.engine.info["max_batch_tokens"])

    async def open(self) -> None:
        """Open the file as it is now, for all new calls. If it can't be served, nothing changes."""
        fresh = await self._open_warm()
        if self._engine is not None and fresh.engine.artifact.sha256 == self._engine.engine.artifact.sha256:
            fresh.cache = self._engine.cache  # the same file: its vectors stay
        before, self._engine, self.fingerprint = self._engine, fresh, fresh.engine.fingerprint
        self.created = int(time.time())
        if before is not None:
            self._leaving.add(before)
            task = asyncio.ensure_future(self._retire(before))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def manifest(self) -> Manifest:
        """What the artifact says about itself."""
        return self.engine.engine.manifest

    def require(self, kind: str) -> None:
        """Raise a problem if the model is of another kind."""
        if self.manifest.kind != kind:
            raise Problem("not_supported", f"model {self.name} is {_KINDS[self.manifest.kind]}")

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer without truncation. Slow at first: not for the event loop."""
        engine, known = self.engine, self._tokenizer
        if known is None or known[0] is not engine:
            tokenizer = tokenizers.Tokenizer.from_str(engine.engine.artifact.tokenizer_json)
            tokenizer.no_truncation()
            self._tokenizer = known = engine, tokenizer
        return known[1]

    def check(self, prompt_name: str | None, dimensions: int | None = None) -> None:
        """Raise a problem for options that this model does not have."""
        prompts, dim = self.engine.engine.prompts, self.manifest.dim
        if prompt_name is not None and prompt_name not in prompts:
            message = f"model {self.name} has no prompt {prompt_name!r}, only: {', '.join(sorted(prompts)) or 'none'}"
            raise Problem("invalid_request", message, param="prompt_name")
        if dimensions is not None and dimensions > dim:
            message = f"dimensions must be at most {dim} with model {self.name}, got {dimensions:g}"
            raise Problem("invalid_request", message, param="dimensions")

    def prompt_name_for(self, input_type: str, param: str) -> str | None:
        """The prompt for texts of this type: that of its name, or as `encode_query` chooses it.

        None if the model has no prompt for it, which is no problem; an unknown type is one.
        """
        engine = self.engine.engine
        if input_type in engine.prompts:
            return input_type
        if input_type not in INPUT_TYPES:
            known = ", ".join(dict.fromkeys([*INPUT_TYPES, *sorted(engine.prompts)]))
            message = f"{param} {input_type[:80]!r} is unknown, use one of: {known}"
            raise Problem("invalid_request", message, param=param)
        task = INPUT_TYPES[input_type]
        return None if task is None else engine.prompt_name_for(task)

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Counts since the start over all engines, and those of errors by the exception's name."""
        total, errors = Counter(self._past), Counter(self._past_errors)
        for engine in (*self._leaving, self.engine):
            _add_counts(engine.stats(), total, errors)
        return total, errors

    async def close(self, drain_s: float) -> None:
        """Let calls end for `drain_s`, and free everything."""
        leaving = [] if self._engine is None else [asyncio.ensure_future(self._engine.close(drain_s))]
        if leaving or self._tasks:
            await asyncio.wait([*leaving, *self._tasks], timeout=drain_s + _CLOSE_S)

    async def _open_warm(self) -> AsyncEngine:
        settings, is_warm = self.settings, threading.Event()

        def observe(name: str, value: float) -> None:
            if is_warm.is_set():
                self._observe(name, value)

        source = self.path.as_posix()

        def open_engine() -> AsyncEngine:
            return AsyncEngine(
                open_model(source, model_precision=settings.model_precision if is_checkpoint(source) else None),
                workers=settings.workers,
                max_batch_tokens=settings.max_batch_tokens,
                max_queue_tokens=settings.max_queue_tokens,
                max_delay_ms=settings.max_delay_ms,
                max_wait_s=settings.max_wait_s,
                timeout_s=settings.timeout_s,
                verify=settings.verify,
                compute=settings.compute,
                cache_mb=settings.cache_mb,
                observe=observe,
            )

        # An export, or opening a plan, may take minutes: the end of the process must not wait.
        engine = await asyncio.wrap_future(in_daemon_thread("sbert-serve-open", open_engine))
        try:
            self._check_expected(engine.engine.fingerprint)
            longest = engine.engine.manifest.max_length
            if settings.max_queue_tokens < longest:
                room = f"--max-queue-tokens {settings.max_queue_tokens}"
                raise ValueError(f"{room} is less than the {longest} tokens that a text of {self.name} may have")
            await asyncio.wrap_future(in_daemon_thread("sbert-serve-warm", engine.warm_up))
            await _run_once(engine)
            await asyncio.to_thread(give_back)  # opening needs more than serving
        except BaseException:
            await engine.close(0)
            raise
        is_warm.set()
        stats = engine.stats()
        self._past.subtract({name: getattr(stats, name) for name in _COUNTS})  # the warm-up is no client's request
        return engine

    def _check_expected(self, found: Fingerprint) -> None:
        """Raise if the file is not the model that it should be."""
        if self._expected is not None and not any(
            known.startswith(self._expected) for known in (found.exact, found.model)
        ):
            has = f"has the fingerprint {found.exact} ({found.model} without its precision)"
            raise ArtifactError(f"{self.path} {has}, but {self._expected} is expected: see --expect-fingerprint")

    async def _retire(self, engine: AsyncEngine) -> None:
        await engine.close(max(self.settings.drain_s, self.settings.timeout_s))
        _add_counts(engine.stats(), self._past, self._past_errors)
        self._leaving.discard(engine)
        await asyncio.to_thread(give_back)


async def _run_once(engine: AsyncEngine) -> None:
    """Run the model on an ordinary text, to see that it works."""
    text, kind = "An ordinary sentence, to see that the model runs.", engine.engine.manifest.kind
    if kind == RERANKER:
        await engine.predict_counted([("An ordinary question?", text)], on_truncate="ignore", timeout_s=_WARM_S)
    elif kind == SPARSE_ENCODER:
        await engine.encode_sparse([text], on_truncate="ignore", timeout_s=_WARM_S)
    else:
        await engine.encode(text, on_truncate="ignore", timeout_s=_WARM_S)


def _add_counts(stats: AsyncStats, total: Counter[str], errors: Counter[str]) -> None:
    total.update({name: getattr(stats, name) for name in _COUNTS})
    errors.update(stats.errors)
