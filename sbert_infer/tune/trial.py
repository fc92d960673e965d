"""A trial of each candidate: opened, proven by canaries, and timed beside the best one so far."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from sbert_infer.artifact.canaries import Canaries
from sbert_infer.artifact.manifest import RERANKER
from sbert_infer.backends.base import Array, Backend
from sbert_infer.backends.select import READY
from sbert_infer.encode.self_check import RIGHT, first_output, judge, run_canaries
from sbert_infer.errors import EngineError, SbertInferError
from sbert_infer.opening import Opened, open_pipeline
from sbert_infer.similarity import cosine
from sbert_infer.tune.candidates import Candidate
from sbert_infer.tune.workload import Workload

_ROUNDS = 5
_ROUND_S = 0.5  # of the default
_FEWEST = 64  # texts of a round
# By how much something must be faster than what was tried before it, and is simpler.
_WORTH = 1.03
# How near a text's vector alone must be to the one in a batch, whatever it may differ from the
# eager model's. On a CPU they differ by 1e-7 or so, in BF16 not at all; FP16 has some noise.
_SAME, _SAME_ON_GPU = 1 - 1e-5, 0.999

Notify = Callable[[str], object]


@dataclass
class Trial:
    """What was found about a candidate."""

    candidate: Candidate
    backend: str = ""
    max_batch_tokens: int | None = None
    cosine: float | None = None
    left_out: str = ""
    texts_per_s: float | None = None
    ratios: list[float] = field(default_factory=list)  # to the default, of each round

    @property
    def ratio(self) -> float:
        """The speed by that of the default: the median of the rounds."""
        return median(self.ratios)


class Bench:
    """Opens candidates, compares them with the canaries of the first artifact, and times them.

    The one that is best so far stays open, so that the next is timed beside it.
    """

    def __init__(self, canaries: Canaries, workload: Workload, min_cosine: float, notify: Notify) -> None:
        self._canaries, self._workload = canaries, workload
        self._min_cosine, self._notify = min_cosine, notify
        self._texts, self._passes, self.tokens = workload.texts[:_FEWEST], 1, 0  # of a round
        self.trials: list[Trial] = []
        self._champion: tuple[Trial, Opened] | None = None

    @property
    def timed(self) -> int:
        """How many texts a round has."""
        return len(self._texts) * self._passes

    @property
    def best(self) -> tuple[Trial, Backend] | None:
        """The fastest candidate so far of those that are near enough, and what runs it."""
        if self._champion is None or self._champion[0].left_out:
            return None
        trial, opened = self._champion
        return trial, opened.pipeline.backend

    def start(self, candidate: Candidate) -> None:
        """Open the default, with which others are compared. It runs though it may be left out."""
        trial = Trial(candidate)
        self.trials.append(trial)
        opened = self._open(trial)
        if opened is None:
            raise EngineError(f"{candidate.artifact.path}: {trial.left_out}")
        self._champion = trial, opened
        self._set_length(opened)
        taken = [self._seconds(opened) for _ in range(_ROUNDS)]
        trial.ratios, trial.texts_per_s = [1.0] * _ROUNDS, self.timed / median(taken)

    def challenge(self, candidate: Candidate) -> None:
        """Try a candidate. It becomes the best one if it is near enough and clearly faster."""
        assert self._champion is not None  # noqa: S101  # `start` comes first
        trial = Trial(candidate)
        self.trials.append(trial)
        opened = self._open(trial)
        if opened is None:
            return
        loser = opened
        try:
            if not trial.left_out and self._wins(trial, opened):
                loser, self._champion = self._champion[1], (trial, opened)
        finally:
            loser.close()

    def close(self) -> None:
        """Close what is open."""
        if self._champion is not None:
            self._champion[1].close()

    def _open(self, trial: Trial) -> Opened | None:
        """Open a candidate, and compare its vectors; None if it can't be opened."""
        candidate = trial.candidate
        options = replace(candidate.options, passed_over=self._passed_over)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the table says what runs
                opened = open_pipeline(candidate.artifact, options)
        except SbertInferError as error:
            trial.left_out = " ".join(str(error).removeprefix(f"{candidate.artifact.path}: ").split())
            return None
        backend = opened.pipeline.backend
        trial.backend, trial.max_batch_tokens = backend.describe(), backend.max_batch_tokens
        try:
            self._prove(trial, opened)
        except BaseException:
            opened.close()
            raise
        return opened

    def _wins(self, trial: Trial, opened: Opened) -> bool:
        """Time a candidate and the best one so far in turns; return whether it takes its place."""
        assert self._champion is not None  # noqa: S101
        champion, other = self._champion
        self._seconds(opened)  # to warm up
        taken, ratios = [], []
        for number in range(_ROUNDS):
            order = [opened, other] if number % 2 else [other, opened]
            seconds = {id(each): self._seconds(each) for each in order}
            taken.append(seconds[id(opened)])
            ratios.append(seconds[id(other)] / seconds[id(opened)])
        trial.texts_per_s = self.timed / median(taken)
        trial.ratios = [ratio * champion.ratio for ratio in ratios]
        faster = sum(ratio > 1 for ratio in ratios) >= _ROUNDS - 1
        return bool(champion.left_out) or (faster and median(ratios) >= _WORTH)

    def _prove(self, trial: Trial, opened: Opened) -> None:
        """Compare with the eager model's vectors that the first artifact holds."""
        manifest, canaries, device = opened.artifact.manifest, self._canaries, opened.pipeline.backend.device
        found = run_canaries(opened.pipeline, manifest, canaries)
        verdict = judge(manifest, device, canaries, found)
        trial.cosine = _nearness(manifest.kind, found, [canaries.results[row] for row, _ in found])
        together = dict(found[: len(canaries.texts)])
        alone = found[len(canaries.texts) :]
        same = _nearness(manifest.kind, alone, [together[row] for row, _ in alone])
        if verdict.verdict != RIGHT:
            trial.left_out = str(verdict)
        elif not same >= (_SAME if device == "cpu" else _SAME_ON_GPU):
            trial.left_out = f"a text's vector depends on its batch: cosine {same:.6f}"
        elif not trial.cosine >= self._min_cosine:
            trial.left_out = f"cosine below {self._min_cosine:g}"

    def _passed_over(self, choice: str, why: str) -> None:
        if choice == READY:
            self._notify(f"building a TensorRT engine, which may take minutes: {why}")

    def _set_length(self, opened: Opened) -> None:
        """Find how many texts make a round last long enough."""
        self._seconds(opened)
        while (seconds := self._seconds(opened)) < _ROUND_S:
            if len(self._texts) < len(self._workload.texts):
                self._texts = self._workload.texts[: 2 * len(self._texts)]
            else:
                self._passes = max(self._passes + 1, int(self._passes * min(2.0, _ROUND_S / seconds)))

    def _seconds(self, opened: Opened) -> float:
        """Run the texts of a round, and return how long that took."""
        output = first_output(opened.artifact.manifest, self._workload.task, opened.pipeline.tokenizer)
        began = time.perf_counter()
        for _ in range(self._passes):
            self.tokens = sum(window.stats.tokens for window in opened.pipeline.run(self._texts, output))
        return time.perf_counter() - began


def _nearness(kind: str, found: list[tuple[int, Array]], right: list[Array]) -> float:
    """Return the lowest cosine; of scores, the correlation, which is a cosine of all at once."""
    if any(ours.shape != theirs.shape for (_, ours), theirs in zip(found, right, strict=True)):
        return 0.0
    a: Any = np.concatenate([result for _, result in found])
    b: Any = np.concatenate(right)
    if kind == RERANKER:
        a, b = (rows - b.mean(axis=0) for rows in (a, b))
        a, b = a.reshape(1, -1), b.reshape(1, -1)
    return float(np.nan_to_num(cosine(a, b)).min())  # NaN is as far as can be
