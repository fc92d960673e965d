"""onnxruntime on the CPU: one session, single-threaded runs, called by as many threads as there are cores.

A batch that is alone has all the cores to itself: for those there is a second, multi-threaded
session, made when it is first worth it. See docs/adr/0007 for the measurements behind this.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from sbert_infer._util.cores import usable_cores
from sbert_infer.backends.base import Array, Batch
from sbert_infer.backends.onnxruntime_session import Graph, OnnxModel, import_onnxruntime, open_session
from sbert_infer.errors import EngineError

__all__ = ["OnnxBackend"]

# Activations of a batch this large stay in the cache; half or double of it makes no difference that
# can be measured.
_MAX_BATCH_TOKENS = 512
# The second session holds the weights once more: not for models whose file is larger than this.
_MAX_SECOND_SESSION_BYTES = 512 * 2**20
# Nor while runs overlap now and then: one that begins beside a multi-threaded run takes a core from
# it, and all of its threads wait for the one that has none, at each of a hundred steps.
_CALM_S = 0.5


class OnnxBackend:
    """Runs a checked ONNX model with onnxruntime on the CPU."""

    device = "cpu"
    edges: tuple[int, ...] | None = None
    # A batch smaller than this is not worth a hand-over to another worker.
    min_batch_tokens = 64

    def __init__(
        self,
        model: OnnxModel,
        *,
        workers: int | None = None,
        threads: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        self._model = model
        self.threads = threads or 1
        self.workers = workers or max(1, usable_cores() // self.threads)
        self.max_batch_tokens = max_batch_tokens or _MAX_BATCH_TOKENS
        self._session: Any = open_session(model, self.threads)
        self._graph = Graph.of(self._session)
        self.outputs = self._graph.outputs
        self._lock = threading.Lock()
        self._running = 0
        self._overlapped = -math.inf  # when a run last began beside another
        self._lone_runs = 0
        self._lone_session: Any = None
        _before_fork(self._drop_lone_session)
        # A user who sets the threads or the workers has decided how the cores are to be used.
        small = model.size <= _MAX_SECOND_SESSION_BYTES
        self._share_cores = threads is None and workers is None and self.workers > 1 and small

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Array]:
        """Run a batch and return `outputs`, each [rows, ...], in their order."""
        try:
            session = self._begin(alone)
            if session is None:
                raise EngineError("the engine was closed during this call")
            found: list[Array] = session.run(outputs, self._graph.feed(batch))
            return found
        except EngineError:
            raise
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise EngineError(f"onnxruntime failed on a batch of {batch.shape} tokens: {error}") from error
        finally:
            with self._lock:
                self._running -= 1

    def describe(self) -> str:
        """What runs and where, in a few words."""
        version = import_onnxruntime().__version__
        return f"onnxruntime {version} on CPU, {self.workers} workers x {self.threads} threads"

    def close(self) -> None:
        """Free the model."""
        with self._lock:
            self._session = self._lone_session = None
            self._share_cores = False

    def _begin(self, alone: bool) -> Any:
        """The session for the next run: the one with all cores if runs come one by one, but not for their first."""
        with self._lock:
            self._running += 1
            now = time.monotonic()
            if self._running > 1:
                self._overlapped = now
            if not (alone and self._share_cores and now - self._overlapped > _CALM_S):
                return self._session
            self._lone_runs += 1
            if self._lone_session is None and self._lone_runs > 1:
                self._lone_session = open_session(self._model, usable_cores())
            return self._lone_session or self._session

    def _drop_lone_session(self) -> None:
        """Its threads would not survive a fork, and a child that frees it would wait for them forever."""
        with self._lock:
            self._lone_session = None


def _before_fork(method: Callable[[], None]) -> None:
    """Call `method` before each fork for as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=call)
