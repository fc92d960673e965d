"""The method: load all contestants, then run rounds in which each runs once, in rotating order."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import Signals
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.contest.lineup import Contestant
from sbert_infer.bench.contest.process import RemoteWorker
from sbert_infer.bench.errors import BenchError, WorkerError
from sbert_infer.bench.stats import correlation, cosines
from sbert_infer.types import Text

Vectors = npt.NDArray[Any]

_WARM_UP_EVERY = 4  # a quarter of the texts
_TUNE_TEXTS = 128
_LATENCY_TURN = 10  # texts that a contestant encodes one by one before the next has its turn
OWN_PEAKS = frozenset({"bf16", "int8"})  # precisions that a CPU multiplies faster than FP32
_SIGILL = getattr(Signals, "SIGILL", None)


@dataclass(frozen=True)
class Difference:
    """How an entrant's scores differ from the reference's."""

    max_abs: float
    spread: float  # standard deviation of the reference's scores, the scale for `max_abs`
    correlation: float | None  # lowest over the labels; None for the few pairs of a latency turn


@dataclass
class Entrant:
    """A contestant and its results on the current workload. `failure` says why it is out."""

    contestant: Contestant
    worker: RemoteWorker | None = None
    load_s: float | None = None
    failure: str = ""
    note: str = ""
    same_as_own: bool = False  # its tuned configuration turned out to be the library's own
    batch_size: int | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)  # the worker's replies, one per round
    cosines: list[npt.NDArray[np.float64]] = field(default_factory=list)  # with the reference's vectors
    differences: list[Difference] = field(default_factory=list)  # rerankers: from the reference's scores
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether it takes part in the rounds."""
        return not self.failure and not self.same_as_own

    def start_over(self) -> None:
        """Forget what belongs to one workload."""
        self.same_as_own, self.batch_size = False, None
        self.turns, self.cosines, self.differences, self.latencies_ms = [], [], [], []

    def ask(self, command: str, **arguments: Any) -> dict[str, Any] | None:
        """Send a request to its worker; None if it is out, or because the worker fails now."""
        if self.failure or self.worker is None:
            return None
        try:
            return self.worker.ask(command, **arguments)
        except WorkerError as error:
            self.drop(error)
            return None

    def drop(self, error: WorkerError) -> None:
        """Put it out of the contest."""
        self.failure = str(error)
        if self.worker is not None:
            self.worker.close()


class Contest:
    """All entrants, each in a process of its own, compared with the first, the reference."""

    def __init__(self, folder: Path, rivals_python: str = sys.executable, *, pairs: bool = False) -> None:
        """With `pairs`, texts are pairs of texts and vectors are scores."""
        self._folder = folder
        self._pairs = pairs
        self._rivals_python = rivals_python
        self._converted: dict[str, Mapping[str, Any] | WorkerError] = {}  # by converter
        self._machine = RemoteWorker()  # measures the matrix product
        self.entrants: list[Entrant] = []
        self.peaks: dict[str, list[float]] = {}  # precision -> GFLOP/s of a matrix product, one per round
        self._reference: Vectors | None = None

    def enter(self, contestant: Contestant) -> None:
        """Start a contestant and load its model."""
        entrant = Entrant(contestant, failure=contestant.out, note=contestant.note)
        self.entrants.append(entrant)
        try:
            if not contestant.out:
                self._load(entrant)
        except WorkerError as error:
            entrant.drop(error)
        self._check_reference()

    def start_workload(self, texts: Sequence[Text]) -> None:
        """Hand out the texts, and forget the last workload."""
        for entrant in self.entrants:
            entrant.start_over()
        self.peaks = {}
        self.hand_out(texts)

    def hand_out(self, texts: Sequence[Text]) -> None:
        """Give these texts to every entrant."""
        file = self._folder / "texts.json"
        file.write_text(json.dumps(list(texts)), encoding="utf-8")
        for entrant in self.entrants:
            entrant.ask("texts", file=str(file))
        self._reference = None

    def warm_up(self, entrant: Entrant) -> None:
        """Find the batch size of a tuned entrant, then let it encode part of the texts."""
        contestant = entrant.contestant
        sizes = list(contestant.batch_sizes)
        count = max(_TUNE_TEXTS, 2 * max(sizes))  # at least two batches of any size
        if contestant.tuned and (found := entrant.ask("tune", sizes=sizes, count=count)):
            entrant.batch_size = found["batch_size"]
            entrant.same_as_own = contestant.sorts and entrant.batch_size == contestant.own_batch_size
        if entrant.runs:
            entrant.ask("warm_up", every=_WARM_UP_EVERY, **_configuration(entrant))

    def turns(self, number: int) -> list[Entrant]:
        """List the entrants in the order in which they run in round `number`."""
        running = [entrant for entrant in self.entrants if entrant.runs]
        first = number % len(running)
        return running[first:] + running[:first]

    def measure_machine(self, cores: int, device: str = "cpu") -> None:
        """Measure the machine's current peaks, once per round. One that crashes stays unknown."""
        families = {entrant.contestant.family for entrant in self.entrants if not entrant.contestant.out}
        for precision in ["fp32", *sorted(families & OWN_PEAKS)] if device == "cpu" else ["fp16"]:
            if self.peaks.get(precision) == []:
                continue
            try:
                reply = self._machine.ask("peak", precision=precision, cores=cores, device=device)
                self.peaks.setdefault(precision, []).append(reply["gflops"])
            except WorkerError:  # such as an illegal instruction, where AMX is announced and refused
                self.peaks[precision] = []
                self._machine.close()
                self._machine = RemoteWorker()

    def turn(self, entrant: Entrant) -> None:
        """Let an entrant encode all texts, timed."""
        if reply := entrant.ask("encode", out=self._vectors_file(entrant), **_configuration(entrant)):
            entrant.turns.append(reply)
        self._check_reference()

    def compare(self) -> None:
        """Compare this round's vectors with the reference's first ones, not timed."""
        for entrant in self.entrants:  # the reference comes first
            self._collect(entrant)

    def keep_rounds(self, count: int) -> None:
        """Forget all but the first `count` rounds."""
        for peaks in self.peaks.values():
            del peaks[count:]
        for entrant in self.entrants:
            del entrant.turns[count:]

    def latency_turns(self, count: int) -> list[tuple[Entrant, list[int]]]:
        """List who encodes which of the first `count` texts one by one, in order.

        Tuned entries are left out: tuning is about batches.
        """
        starts = range(0, count, _LATENCY_TURN)
        return [
            (entrant, list(range(start, min(start + _LATENCY_TURN, count))))
            for number, start in enumerate(starts)
            for entrant in self.turns(number)
            if not entrant.contestant.tuned
        ]

    def latency_turn(self, entrant: Entrant, rows: list[int]) -> None:
        """Let an entrant encode some of the texts one at a time, timed."""
        if reply := entrant.ask("latency", rows=rows, out=self._vectors_file(entrant)):
            entrant.latencies_ms += reply["ms"]
        self._collect(entrant, rows)

    def vectors(self, entrant: Entrant, prompt: str | None) -> Vectors | None:
        """Let an entrant, the reference first, encode all texts, not timed; None if it failed."""
        entrant.ask("encode", out=self._vectors_file(entrant), batch_size=None, by_length=False, prompt=prompt)
        self._check_reference()
        return self._collect(entrant)

    def close(self) -> None:
        """Kill all workers."""
        for worker in [self._machine, *(entrant.worker for entrant in self.entrants)]:
            if worker is not None:
                worker.close()

    # Loading --------------------------------------------------------------------------------------

    def _load(self, entrant: Entrant) -> None:
        contestant = entrant.contestant = self._convert(entrant.contestant)
        try:
            self._start(entrant, {})
        except WorkerError as error:
            if error.signal != _SIGILL or not contestant.on_sigill:
                raise
            self._start(entrant, contestant.on_sigill)
            settings = " ".join(f"{name}={value}" for name, value in contestant.on_sigill.items())
            without = f"with {settings}: it crashes on this CPU without"
            entrant.note = "; ".join(filter(None, [entrant.note, without]))

    def _start(self, entrant: Entrant, environment: Mapping[str, str]) -> None:
        if entrant.worker is not None:
            entrant.worker.close()
        entrant.worker = RemoteWorker(self._python(entrant.contestant), environment)
        entrant.load_s = entrant.worker.ask("load", spec=dict(entrant.contestant.spec))["seconds"]

    def _convert(self, contestant: Contestant) -> Contestant:
        """Make the files that a contestant runs, once for all with the same converter."""
        name = contestant.converter
        if not name:
            return contestant
        if name not in self._converted:
            made = self._make_files(contestant, {})
            if isinstance(made, WorkerError) and made.signal == _SIGILL:
                made = self._make_files(contestant, contestant.on_sigill)
            self._converted[name] = made
        made = self._converted[name]
        if isinstance(made, WorkerError):
            raise made
        return replace(contestant, spec={**contestant.spec, **made})

    def _make_files(self, contestant: Contestant, environment: Mapping[str, str]) -> Mapping[str, Any] | WorkerError:
        name, spec = contestant.converter, dict(contestant.spec)
        with closing(RemoteWorker(self._python(contestant), environment)) as worker:
            try:
                reply = worker.ask("convert", converter=name, spec=spec, folder=str(self._folder / name))
            except WorkerError as error:
                return error
        return dict(reply["spec"])

    def _python(self, contestant: Contestant) -> str:
        return self._rivals_python if contestant.third_party else sys.executable

    # Comparing ------------------------------------------------------------------------------------

    def _vectors_file(self, entrant: Entrant) -> str:
        return str(self._folder / f"vectors{self.entrants.index(entrant)}.npy")

    def _collect(self, entrant: Entrant, rows: list[int] | None = None) -> Vectors | None:
        """Take the vectors that an entrant wrote, of all texts or of `rows`, and compare them."""
        file = Path(self._vectors_file(entrant))
        if not file.exists():
            return None
        vectors: Vectors = np.load(file)
        file.unlink()
        if self._reference is None:
            self._reference = vectors
        expected = self._reference if rows is None else self._reference[rows]
        if self._pairs:
            entrant.differences.append(_difference(vectors, expected, whole=rows is None))
        else:  # vectors of another shape count as a cosine of 0 each
            same = vectors.shape == expected.shape
            entrant.cosines.append(cosines(vectors, expected) if same else np.zeros(len(expected)))
        return vectors

    def _check_reference(self) -> None:
        if reason := self.entrants[0].failure:
            raise BenchError(f"the {self.entrants[0].contestant.name} reference can't run: {reason}")


def _configuration(entrant: Entrant) -> dict[str, Any]:
    return {"batch_size": entrant.batch_size, "by_length": entrant.contestant.tuned}


def _difference(scores: Vectors, reference: Vectors, *, whole: bool) -> Difference:
    """Compare scores, both [pairs, labels]; scores of another shape are infinitely wrong."""
    spread = float(reference.std(axis=0).mean()) or float(np.abs(reference).mean())  # if all are equal, their size
    if scores.shape != reference.shape:
        return Difference(float("inf"), spread, 0.0)
    found = [correlation(a, b) for a, b in zip(scores.T, reference.T, strict=True)] if whole and len(scores) > 1 else []
    return Difference(float(np.abs(scores - reference).max()), spread, min(found, default=None))
