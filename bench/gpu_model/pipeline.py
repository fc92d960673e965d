"""The pipeline of `sbert_infer/encode/pipeline.py` on a GPU, simulated.

The calling thread tokenizes windows of texts. A worker for each slot of the GPU makes a batch,
copies it to page-locked memory, queues copy, run and copy on the slot's stream, waits, and takes
the vectors. Python's interpreter lock is a resource like the others: a worker gives it up while it
waits for the GPU. It is taken to keep it during short CUDA calls, which give it up as well, but end
before another thread wakes up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sbert_infer.bench.gpu_model.events import Actor, Events, Flag, Interval, Resource, Use

# How long a thread keeps Python's lock while others wait: sys.getswitchinterval().
SWITCH_INTERVAL_S = 5e-3


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of each stage of a batch."""

    make_s: float  # in Python, with the CUDA calls that queue its work
    copy_in_s: float
    run_s: float
    copy_out_s: float
    take_s: float  # in Python


@dataclass(frozen=True)
class WindowCosts:
    """Seconds of the calling thread for a window of texts, and the window's batches."""

    tokenize_s: float  # in the tokenizer's own threads
    collect_s: float  # in Python: token ids to arrays
    plan_s: float  # in Python: which texts run together
    gather_s: float  # in Python: vectors to the result
    batches: tuple[BatchCosts, ...]
    pieces: int = 1  # in which the texts are tokenized, and their ids collected


@dataclass(frozen=True)
class Trace:
    """What happened when, by resource."""

    seconds: float
    resources: dict[str, Resource]

    def busy(self, name: str) -> float:
        """Return the share of time, from its first use to its last, that a resource was used."""
        intervals = self.resources[name].intervals
        return self.resources[name].busy_s / (intervals[-1].end - intervals[0].start) if intervals else 0.0

    def uses(self, name: str) -> list[Interval]:
        """Return the uses of a resource, in their order."""
        return self.resources[name].intervals


def simulate(
    windows: Sequence[WindowCosts],
    *,
    slots: int = 2,
    windows_ahead: int = 1,
    switch_interval_s: float = SWITCH_INTERVAL_S,
) -> Trace:
    """Run `windows` through the pipeline.

    Args:
        windows: what each of them costs.
        slots: batches that can be under way on the GPU, each with a worker thread.
        windows_ahead: windows that may be unfinished when the next one is tokenized.
        switch_interval_s: how long a thread keeps Python's lock while others wait.

    """
    pipeline = _Pipeline(switch_interval_s)
    for number in range(slots):
        pipeline.events.start(pipeline.worker(number))
    pipeline.events.start(pipeline.caller(windows, windows_ahead))
    return Trace(pipeline.events.run(), {each.name: each for each in pipeline.resources})


@dataclass(eq=False)
class _Window:
    """A window whose batches run."""

    unfinished: int
    done: Flag = field(default_factory=Flag)


class _Pipeline:
    def __init__(self, switch_interval_s: float) -> None:
        self.events = Events()
        self.tokenizer, self.python = Resource("tokenizer"), Resource("python", switch_interval_s)
        self.copy_in, self.gpu, self.copy_out = Resource("copy in"), Resource("gpu"), Resource("copy out")
        self.resources = (self.tokenizer, self.python, self.copy_in, self.gpu, self.copy_out)
        self._queue: deque[tuple[str, BatchCosts, _Window]] = deque()
        self._idle: deque[Flag] = deque()  # of workers without a batch

    def caller(self, windows: Sequence[WindowCosts], windows_ahead: int) -> Actor:
        """Tokenize windows, submit their batches, and wait for those before."""
        running: deque[tuple[WindowCosts, _Window]] = deque()
        for number, window in enumerate(windows):
            for _ in range(window.pieces):
                yield Use(self.tokenizer, window.tokenize_s / window.pieces, f"window {number}")
                yield Use(self.python, window.collect_s / window.pieces, f"window {number}")
            yield Use(self.python, window.plan_s, f"window {number}")
            running.append((window, self._submit(number, window)))
            if len(running) > windows_ahead:
                yield from self._finish(*running.popleft())
        while running:
            yield from self._finish(*running.popleft())

    def worker(self, number: int) -> Actor:
        """Run batches on one slot, one after another."""
        while True:
            while not self._queue:
                self._idle.append(Flag())
                yield self._idle[-1]
            name, batch, window = self._queue.popleft()
            yield from self._run(name, batch)
            window.unfinished -= 1
            if not window.unfinished:
                self.events.lift(window.done)

    def _run(self, name: str, batch: BatchCosts) -> Iterator[Use | Flag]:
        yield Use(self.python, batch.make_s, name)
        yield Use(self.copy_in, batch.copy_in_s, name)
        yield Use(self.gpu, batch.run_s, name)
        yield Use(self.copy_out, batch.copy_out_s, name)
        yield Use(self.python, batch.take_s, name)

    def _finish(self, costs: WindowCosts, window: _Window) -> Iterator[Use | Flag]:
        yield window.done
        yield Use(self.python, costs.gather_s, "gather")

    def _submit(self, number: int, costs: WindowCosts) -> _Window:
        window = _Window(len(costs.batches))
        self._queue.extend((f"batch {number}.{at}", batch, window) for at, batch in enumerate(costs.batches))
        for _ in range(min(len(costs.batches), len(self._idle))):
            self.events.lift(self._idle.popleft())
        if not costs.batches:
            self.events.lift(window.done)
        return window
