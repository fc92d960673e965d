"""onnxruntime on the CPU: one session, in which each core runs a batch of its own.

A batch that runs alone may use all cores: for those there is a second, multi-threaded session,
opened when it is first worth it. See docs/adr/0007 for the measurements behind this.
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
from sbert_infer.backends.base import CLOSED, Array, Batch
from sbert_infer.backends.onnxruntime_session import Graph, OnnxModel, import_onnxruntime, open_session
from sbert_infer.errors import EngineError
from sbert_infer.text.packing import Packer

# The activations of a batch of this size stay in the cache. Half or twice the size makes no
# measurable difference.
_MAX_BATCH_TOKENS = 512
# The second session holds another copy of the weights, so larger models do without it.
_MAX_SECOND_SESSION_BYTES = 512 * 2**20
# The second session is not used until runs have not overlapped for this long. A run that starts
# beside a multi-threaded one takes a core from it, and at each of a hundred steps all of that run's
# threads wait for the one without a core.
_CALM_S = 0.5


class OnnxBackend:
    """Runs a checked ONNX model with onnxruntime on the CPU."""

    device = "cpu"
    packer: Packer | None = None
    length_multiple = 1
    # A smaller batch is not worth handing to another worker.
    min_batch_tokens = 64
    spare_workers = 1  # shares the cores with the others, which is sooner than to wait for one

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
        self._overlapped = -math.inf  # time at which a run last started while another was running
        self._lone_runs = 0
        self._lone_session: Any = None
        _before_fork(self._drop_lone_session)
        # A user who sets the threads or the workers has decided how to use the cores.
        small = model.size <= _MAX_SECOND_SESSION_BYTES
        self._share_cores = threads is None and workers is None and self.workers > 1 and small

    def run(self, batch: Batch, outputs: Sequence[str], *, alone: bool = False) -> list[Array]:
        """Run a batch and return the `outputs` in that order, each [rows, ...]."""
        try:
            session = self._begin(alone)
            if session is None:
                raise EngineError(CLOSED)
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
        """Return a short description of what runs and where."""
        version = import_onnxruntime().__version__
        return f"onnxruntime {version} on CPU, {self.workers} workers x {self.threads} threads"

    def close(self) -> None:
        """Free the model."""
        with self._lock:
            self._session = self._lone_session = None
            self._share_cores = False

    def _begin(self, alone: bool) -> Any:
        """Count a run as started and return its session.

        That is the multi-threaded one if runs come one at a time, but not for the first of them.
        """
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
        """Drop the multi-threaded session before a fork.

        Its threads do not survive a fork, and a child that freed it would wait for them forever.
        """
        with self._lock:
            self._lone_session = None


def _before_fork(method: Callable[[], None]) -> None:
    """Call `method` before each fork, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=call)
