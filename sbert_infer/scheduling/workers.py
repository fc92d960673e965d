"""Worker threads, which run the scheduler's batches and are replaced if they hang or die.

If a batch fails, its worker finds the texts that are to blame. A thread can't be killed: one that
hangs is left behind with its backend, and new threads start with a new backend.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np

from sbert_infer.backends.base import Backend, Batch
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.errors import WorkerError
from sbert_infer.scheduling.call import Call, succeed
from sbert_infer.scheduling.request import Part, Request, Work
from sbert_infer.scheduling.scheduler import Scheduler
from sbert_infer.text.tokenizer import TokenizedTexts
from sbert_infer.types import Observe

_WATCH_S = 0.2
_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
# A batch that takes this many times as long as its size suggests, and at least this many seconds,
# seems to hang: `ready` becomes False. A busy machine may well pause for a second or two.
_SUSPECT_TIMES = 10
_SUSPECT_S = 3.0
# Each backend that was left behind keeps its memory. With this many, only a new process helps.
_MAX_HUNG = 3


class Fault(NamedTuple):
    """A text that can't be encoded."""

    request: Request
    row: int
    reason: str
    not_finite: bool  # the model ran, but returned NaN or infinity


class _Run(NamedTuple):
    backend: Backend
    thread: threading.Thread


class Workers:
    """One thread for each worker of the backend, spare ones too, and one that watches them.

    The condition `changed` guards the scheduler.
    """

    _idle = 0  # number of threads that wait, or are about to

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        outputs: Sequence[str],
        replace_backend: Callable[[], Backend],
        *,
        hang_timeout_s: float,
        observe: Observe,
    ) -> None:
        self.changed = threading.Condition()
        self.restarts = 0
        self.problem = ""  # why there are no workers, if the last attempt to replace them failed
        self._scheduler, self._pipeline, self._outputs = scheduler, pipeline, tuple(outputs)
        self._replace_backend = replace_backend
        self._hang_timeout_s, self._observe = hang_timeout_s, observe
        self._probe = _probe(pipeline)
        self._backend: Backend | None = None  # used by the current threads; None if there are none
        self._threads: list[threading.Thread] = []
        self._runs: dict[Work, _Run] = {}
        self._hung: list[threading.Thread] = []
        self._usual_s: float | None = None  # the most that recent batches took for each of their tokens
        self._suspected = False  # whether a running batch seems to hang
        self._failures = 0  # consecutive failures to open a new backend
        self._retry_at = -math.inf
        self._stop = threading.Event()
        self._begin(pipeline.backend)
        self._watchdog = threading.Thread(target=self._watch, name="sbert-infer-watchdog", daemon=True)
        self._watchdog.start()

    @property
    def ready(self) -> bool:
        """Whether there are workers, and none seems to hang."""
        return self._backend is not None and not self._suspected and not self._stop.is_set()

    def wake(self) -> None:
        """Wake a worker, after a request was added to the scheduler."""
        # Busy workers look for requests by themselves, and may hold the lock for milliseconds.
        if self._idle:
            with self.changed:
                self.changed.notify()

    def stop(self, timeout_s: float) -> None:
        """Start no more batches, and wait up to `timeout_s` for those that run."""
        with self.changed:
            self._stop.set()
            self.changed.notify_all()
            threads = [*self._threads, self._watchdog]
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _begin(self, backend: Backend) -> None:
        threads = [
            threading.Thread(target=self._work, args=(backend,), name=f"sbert-infer-worker_{number}", daemon=True)
            for number in range(backend.workers + backend.spare_workers)
        ]
        with self.changed:  # held until all have started: `stop` can't join one that has not
            self._backend, self.problem, self._threads = backend, "", threads
            for thread in threads:
                thread.start()

    def _work(self, backend: Backend) -> None:
        while (work := self._next(backend)) is not None:
            noted = work.note_start()
            try:
                faults = find_faults(partial(self._run, backend, work), work.parts, partial(self._check, backend))
            except BaseException as error:  # no text is to blame
                self._lose(work, f"the worker that ran it died: {error!r}")
                return
            if noted is not None:
                noted.ended = time.monotonic()  # before callers get their results
            self._finish(work, faults)

    def _next(self, backend: Backend) -> Work | None:
        """Wait for a batch and return it; return None if this thread must end."""
        with self.changed:
            while self._backend is backend and not self._stop.is_set():
                now = time.monotonic()
                if (work := self._scheduler.next_batch(now)) is not None:
                    self._runs[work] = _Run(backend, threading.current_thread())
                    if self._idle and self._scheduler.queued_tokens:
                        self.changed.notify()  # there may be work for a thread that was not woken
                    return work
                wake = self._scheduler.wake_at()
                self._idle += 1
                # Check again: a request that came before `_idle` was raised has woken no thread.
                if not self._scheduler.may_read:
                    self.changed.wait(None if wake == math.inf else max(0.0, wake - now))
                self._idle -= 1
            self.changed.notify_all()  # others may be waiting for the batch that this thread ran last
        return None

    def _run(self, backend: Backend, work: Work, parts: list[Part]) -> list[Part]:
        """Run some texts of a batch and store their vectors; return those that are not finite."""
        work.last_started = time.monotonic()
        calls = [(cast(Call, request), rows) for request, rows in parts]
        tokenized = TokenizedTexts.joined((call.tokenized, rows) for call, rows in calls)
        found, tokens = self._pipeline.run_all(
            tokenized,
            self._outputs,
            length=work.length,
            prompt_length=work.prompt_length,
            backend=backend,
            alone=work.alone,
        )
        work.padded_tokens += tokens
        bad: list[Part] = []
        stop = 0
        for call, rows in calls:
            start, stop = stop, stop + len(rows)
            failed = call.store(rows, [values[start:stop] for values in found])
            if len(failed):
                bad.append((call, failed))
        return bad

    def _check(self, backend: Backend) -> None:
        """Raise if `backend` can't run an ordinary text either."""
        if not all(np.isfinite(values).all() for values in backend.run(self._probe, self._outputs)):
            raise ArithmeticError("it gives NaN or infinity for an ordinary text")

    def _finish(self, work: Work, faults: list[Fault]) -> None:
        took = time.monotonic() - work.started
        with self.changed:
            if work in self._scheduler.running:  # otherwise it was given up
                self._usual_s = max(took / _size(work), 0.9 * (self._usual_s or 0.0))
            for fault in faults:
                self._scheduler.drop(fault.request)
            finished = self._scheduler.done(work, time.monotonic())
            self._runs.pop(work, None)
        for fault in faults:
            cast(Call, fault.request).blame(fault.row, fault.reason, not_finite=fault.not_finite)
        succeed(cast(Call, request) for request in finished)
        for call in finished:
            if (read_s := cast(Call, call).read_s) is not None:
                self._observe("tokenize", read_s)
        self._observe("run", took)
        self._observe("batch_tokens", work.tokens)
        for request in {request for request, _ in work.parts}:
            self._observe("queue", work.started - request.arrival)

    def _lose(self, work: Work, reason: str) -> None:
        """Give up a batch, and all threads that share its backend."""
        with self.changed:
            if not self._scheduler.abandon(work):
                return
            run = self._runs.pop(work)
            lost = {request: None for request, _ in work.parts if not request.ended}
            for request in lost:
                self._scheduler.drop(request)
            if run.thread is not threading.current_thread():
                self._hung.append(run.thread)
            if self._backend is run.backend:
                self._backend = None
            self.changed.notify_all()
        self._fail(list(lost), reason)

    def _watch(self) -> None:
        while not self._stop.wait(_WATCH_S):
            now = time.monotonic()
            with self.changed:
                running = self._scheduler.running
                hung = [work for work in running if work.last_started < now - self._most_s(work)]
                self._suspected = any(work.last_started < now - self._patience_s(work) for work in running)
                dead = [work for work, run in self._runs.items() if not run.thread.is_alive()]
                ended = not all(thread.is_alive() for thread in self._threads)  # even without a batch
                if ended and not self._stop.is_set():
                    self._backend = None
                    self.changed.notify_all()
            for work in hung:
                self._lose(work, f"the worker that ran it hung for {self._most_s(work):g} s")
            for work in dead:
                self._lose(work, "the worker that ran it died")
            if self._backend is None and time.monotonic() >= self._retry_at:
                self._replace()

    def _most_s(self, work: Work) -> float:
        """Return after how long a batch is given up: a text longer than a full batch has more."""
        return self._hang_timeout_s * max(1.0, _size(work) / self._scheduler.limits.max_batch_tokens)

    def _patience_s(self, work: Work) -> float:
        """Return how long a batch may run before it seems to hang."""
        if self._usual_s is None:
            return self._most_s(work)
        return min(self._most_s(work), max(_SUSPECT_S, _SUSPECT_TIMES * self._usual_s * _size(work)))

    def _replace(self) -> None:
        """Open a new backend and start its threads; if that fails, fail all queued requests."""
        self._hung = [thread for thread in self._hung if thread.is_alive()]
        try:
            if len(self._hung) >= _MAX_HUNG:
                raise RuntimeError(f"{len(self._hung)} workers hang and keep their memory: restart the process")
            before = self._replace_backend()
        except Exception as error:
            self._failures += 1
            wait = min(_LONGEST_RETRY_S, _RETRY_S * 2 ** (self._failures - 1))
            self._retry_at = time.monotonic() + wait
            with self.changed:
                self.problem = f"the model can't be opened again: {error}"
                lost = self._scheduler.drop_all()
            self._fail(lost, self.problem)
            return
        self._failures = 0
        self.restarts += 1
        threading.Thread(target=before.close, name="sbert-infer-close", daemon=True).start()  # may wait for a hung run
        self._begin(self._pipeline.backend)

    def _fail(self, requests: list[Request], reason: str) -> None:
        for request in requests:
            cast(Call, request).fail(WorkerError(reason, max(_RETRY_S, self._retry_at - time.monotonic())))


def find_faults(run: Callable[[list[Part]], list[Part]], parts: list[Part], check: Callable[[], object]) -> list[Fault]:
    """Run texts; if that fails, run halves of them, down to the texts that fail by themselves.

    `run` returns the texts whose vectors are not finite. `check` raises if `run` would fail on any
    text.
    """
    faults: list[Fault] = []
    todo = [parts]
    while todo:
        parts = todo.pop()
        reason, not_finite = "the model gives NaN or infinity", True
        try:
            bad = run(parts)
        except Exception as error:
            bad, reason, not_finite = parts, f"the model fails: {error}", False
        if _count(parts) == 1:
            if bad and not faults:
                check()
            faults += [Fault(request, int(rows[0]), reason, not_finite) for request, rows in bad]
        elif bad:
            todo += _halves(bad)
    return faults


def _size(work: Work) -> int:
    """Return the number of tokens of a batch, padding included unless its texts are packed."""
    return max(1, work.tokens) if work.length is None else work.length * max(1, work.texts)


def _count(parts: list[Part]) -> int:
    return sum(len(rows) for _, rows in parts)


def _halves(parts: list[Part]) -> list[list[Part]]:
    texts = [(request, rows[at : at + 1]) for request, rows in parts for at in range(len(rows))]
    middle = len(texts) // 2
    return [half for half in (texts[:middle], texts[middle:]) if half]


def _probe(pipeline: Pipeline) -> Batch:
    """Return a batch of one ordinary text."""
    tokenized = pipeline.tokenizer(["a"])
    (rows,) = pipeline.cut(tokenized.lengths, pipeline.backend.max_batch_tokens)
    return pipeline.make_batch(tokenized, rows)
