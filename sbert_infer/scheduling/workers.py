"""Threads that run the batches of a scheduler, find the text that makes one fail, and are replaced if they hang or die.

A thread can't be killed. One that hangs is left behind with its backend, and new ones start on a
fresh backend.
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
from sbert_infer.text.batching import cut_batches
from sbert_infer.text.tokenizer import TokenizedTexts
from sbert_infer.types import Observe

__all__ = ["Workers", "find_faults"]


_WATCH_S = 0.2
_RETRY_S = 1.0
_LONGEST_RETRY_S = 30.0
# A batch that takes so many times as long as usual, but at least so long, seems to hang: `ready`
# turns off.
_SUSPECT_TIMES = 10
_SUSPECT_S = 0.5
# Each backend that was left behind keeps its memory. After so many, only a new process helps.
_MAX_HUNG = 3


class Fault(NamedTuple):
    """A text that can't be encoded."""

    request: Request
    row: int
    reason: str
    is_finite: bool  # False: the model ran, but gave NaN or infinity


class _Run(NamedTuple):
    backend: Backend
    thread: threading.Thread


class Workers:
    """As many threads as the backend has workers, and one that watches them. `changed` guards the scheduler."""

    _idle = 0  # threads that wait, or are about to

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
        self.problem = ""  # why there are no workers, if there is no hope that there soon will be
        self._scheduler, self._pipeline, self._outputs = scheduler, pipeline, tuple(outputs)
        self._replace_backend = replace_backend
        self._hang_timeout_s, self._observe = hang_timeout_s, observe
        self._probe = _probe(pipeline)
        self._backend: Backend | None = None  # that the current threads use
        self._threads: list[threading.Thread] = []
        self._runs: dict[Work, _Run] = {}
        self._hung: list[threading.Thread] = []
        self._usual_s: float | None = None  # that a batch takes, of late
        self._suspected = False  # whether one that runs seems to hang
        self._failures = 0  # of opening a fresh backend, in a row
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
        """Something was added to the scheduler."""
        if self._idle:  # otherwise they look by themselves, and the lock may be held for milliseconds
            with self.changed:
                self.changed.notify()

    def stop(self, timeout_s: float) -> None:
        """Start no more batches, and wait for those that run, but not for what hangs."""
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
            for number in range(backend.workers)
        ]
        with self.changed:  # until all have started, or `stop` could find one that has not
            self._backend, self.problem, self._threads = backend, "", threads
            for thread in threads:
                thread.start()

    def _work(self, backend: Backend) -> None:
        while (work := self._next(backend)) is not None:
            try:
                faults = find_faults(partial(self._run, backend, work), work.parts, partial(self._check, backend))
            except BaseException as error:  # not the fault of a text
                self._lose(work, f"the worker that ran it died: {error!r}")
                return
            self._finish(work, faults)

    def _next(self, backend: Backend) -> Work | None:
        """Wait for a batch; None when this thread is to end."""
        with self.changed:
            while self._backend is backend and not self._stop.is_set():
                now = time.monotonic()
                if (work := self._scheduler.next_batch(now)) is not None:
                    self._runs[work] = _Run(backend, threading.current_thread())
                    if self._idle and self._scheduler.queued_tokens:
                        self.changed.notify()  # there may be something for another, who was not woken
                    return work
                wake = self._scheduler.wake_at()
                self._idle += 1
                if not self._scheduler.may_read:  # a last look: what comes from now on wakes somebody
                    self.changed.wait(None if wake == math.inf else max(0.0, wake - now))
                self._idle -= 1
            self.changed.notify_all()  # what this thread ran last may be what others wait for
        return None

    def _run(self, backend: Backend, work: Work, parts: list[Part]) -> list[Part]:
        """Run some texts of a batch and keep their vectors. Gives those whose vectors are not finite."""
        work.last_started = time.monotonic()
        calls = [(cast(Call, request), rows) for request, rows in parts]
        tokenized = TokenizedTexts.joined((call.tokenized, rows) for call, rows in calls)
        rows = np.arange(len(tokenized.lengths))
        batch = self._pipeline.make_batch(tokenized, rows, work.length, work.prompt_length)
        found = backend.run(batch, self._outputs, alone=work.alone)  # each [texts, ...]
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
            if work in self._scheduler.running:  # else it was given up long ago
                self._usual_s = max(took, 0.9 * (self._usual_s or 0.0))
            for fault in faults:
                self._scheduler.drop(fault.request)
            finished = self._scheduler.done(work, time.monotonic())
            self._runs.pop(work, None)
        for fault in faults:
            cast(Call, fault.request).blame(fault.row, fault.reason, is_finite=fault.is_finite)
        succeed(cast(Call, request) for request in finished)
        for call in finished:
            if (read_s := cast(Call, call).read_s) is not None:
                self._observe("tokenize", read_s)
        self._observe("run", took)
        self._observe("batch_tokens", work.tokens)
        for request in {request for request, _ in work.parts}:
            self._observe("queue", work.started - request.arrival)

    def _lose(self, work: Work, reason: str) -> None:
        """Give up a batch, and every thread that shares its backend."""
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
            now, patience_s = time.monotonic(), self._patience_s()
            with self.changed:
                hung = [work for work in self._scheduler.running if work.last_started < now - self._hang_timeout_s]
                self._suspected = any(work.last_started < now - patience_s for work in self._scheduler.running)
                dead = [work for work, run in self._runs.items() if not run.thread.is_alive()]
                ended = not all(thread.is_alive() for thread in self._threads)  # with a batch or without
                if ended and not self._stop.is_set():
                    self._backend = None
                    self.changed.notify_all()
            for work in hung:
                self._lose(work, f"the worker that ran it hung for {self._hang_timeout_s:g} s")
            for work in dead:
                self._lose(work, "the worker that ran it died")
            if self._backend is None and time.monotonic() >= self._retry_at:
                self._replace()

    def _patience_s(self) -> float:
        """How long a batch may run before it seems to hang. It is given up only after `hang_timeout_s`."""
        if self._usual_s is None:
            return self._hang_timeout_s
        return min(self._hang_timeout_s, max(_SUSPECT_S, _SUSPECT_TIMES * self._usual_s))

    def _replace(self) -> None:
        """Open a fresh backend. Until that succeeds, what is queued fails, rather than wait for nothing."""
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
    """Run texts, and if that fails run halves of them, down to the texts that fail by themselves.

    `run` gives the texts whose vectors are not finite. `check` raises if it is not a text's fault
    that `run` raised.
    """
    faults: list[Fault] = []
    todo = [parts]
    while todo:
        parts = todo.pop()
        reason, is_finite = "the model gives NaN or infinity", False
        try:
            bad = run(parts)
        except Exception as error:
            bad, reason, is_finite = parts, f"the model fails: {error}", True
        if _count(parts) == 1:
            if bad and not faults:
                check()
            faults += [Fault(request, int(rows[0]), reason, is_finite) for request, rows in bad]
        elif bad:
            todo += _halves(bad)
    return faults


def _count(parts: list[Part]) -> int:
    return sum(len(rows) for _, rows in parts)


def _halves(parts: list[Part]) -> list[list[Part]]:
    texts = [(request, rows[at : at + 1]) for request, rows in parts for at in range(len(rows))]
    middle = len(texts) // 2
    return [half for half in (texts[:middle], texts[middle:]) if half]


def _probe(pipeline: Pipeline) -> Batch:
    """Return a batch of one ordinary text."""
    tokenized = pipeline.tokenizer(["a"])
    backend = pipeline.backend
    (batch,) = cut_batches(tokenized.lengths, backend.max_batch_tokens, edges=backend.edges)
    return pipeline.make_batch(tokenized, batch.rows, batch.length)
