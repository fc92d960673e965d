"""One whole run of `sbert-bench`: line up the contestants, run the workloads, score the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbert_infer._util.cores import usable_cores
from sbert_infer.bench.contest.cuda_lineup import cuda_line_up
from sbert_infer.bench.contest.lineup import PACKAGES, TUNED, Contestant, choose, line_up, not_installed, settle
from sbert_infer.bench.contest.models_under_test import ModelsUnderTest, check_weights
from sbert_infer.bench.contest.process import RemoteWorker
from sbert_infer.bench.contest.rounds import Contest
from sbert_infer.bench.errors import BenchError, WorkerError
from sbert_infer.bench.quality.evaluate import evaluate, make_tasks
from sbert_infer.bench.quality.tasks import Task
from sbert_infer.bench.report.machine import machine_stamp
from sbert_infer.bench.report.results import QUALITY, Results, Row, WorkloadFacts
from sbert_infer.bench.report.verdict import score, score_quality
from sbert_infer.bench.stats import flops
from sbert_infer.bench.workloads import make_pairs, make_workload
from sbert_infer.text.inputs import prepend
from sbert_infer.text.pair_tokenizer import PairTokenizer
from sbert_infer.text.tokenizer import Tokenizer
from sbert_infer.types import Text

Progress = Callable[[str], object]

_CALIBRATION_TEXTS = 300  # what NNCF takes by default


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    rounds: int = 5
    seed: int = 0
    latency_texts: int = 0  # encoded one at a time; 0 leaves latency out
    sts: tuple[Path, ...] = ()  # datasets, for quality
    pairs: tuple[Path, ...] = ()
    beir: tuple[Path, ...] = ()
    rivals_python: str = sys.executable
    only: tuple[str, ...] = ()  # parts of names; empty means all
    trust_remote_code: bool = False
    device: str = "cpu"  # or "cuda": who takes part, and where


@dataclass(frozen=True)
class Surroundings:
    """What the two interpreters hold, and facts about the checkpoint that need torch."""

    ours: dict[str, str]  # package -> version
    theirs: dict[str, str]
    theirs_python: str
    checkpoint: dict[str, Any]  # what the loaders need to know about it
    gpu: str  # that PyTorch uses, or empty
    flops: Sequence[float]  # coefficients by length, as `stats.flops` takes them


def run_session(
    models: ModelsUnderTest,
    workloads: Mapping[str, Sequence[str]],
    settings: Settings,
    folder: Path,
    progress: Progress = lambda line: None,
    extra: Sequence[Contestant] = (),
) -> Results:
    """Measure all contestants on the workloads (name -> texts) and on the datasets in `settings`.

    Without a workload, only quality is measured. `folder` takes temporary files; `extra`
    contestants are for tests. Ctrl-C returns what was measured so far, if a round of the first
    workload is complete.
    """
    tasks = make_tasks(models, settings.sts, settings.pairs, settings.beir)
    progress("looking around")
    around = _look_around(models, settings, speed=bool(workloads))
    around.checkpoint["calibration"] = _write_calibration(workloads, folder)
    everyone = [*settle(_line_up(models, settings, around), around.ours), *extra]
    absent = not_installed(everyone, around.ours, around.theirs)
    chosen = choose(everyone, absent, settings.only)
    stamp = {**machine_stamp(), **_stamp(models, settings, around), "workloads": list(workloads)}
    stamp[QUALITY] = [task.describe() for task in tasks]
    with closing(Contest(folder, settings.rivals_python, pairs=models.pairs)) as contest:
        for contestant in chosen if workloads else [one for one in chosen if one.own_quality]:
            progress(f"loading {contestant.name}")
            contest.enter(contestant)
        facts: list[WorkloadFacts] = []
        rows: list[Row] = []
        try:
            for name, given in workloads.items():
                texts = make_pairs(given) if models.pairs else given
                rounds = _run_workload(contest, name, texts, settings, progress)
                facts.append(_facts(name, texts, models, around, contest.peaks))
                rows += score(contest.entrants, facts[-1])
                if rounds < settings.rounds:
                    raise KeyboardInterrupt
            rows = _measure_quality(contest, tasks, models, rows, progress)
        except KeyboardInterrupt:  # keep what was measured so far
            if not rows:
                raise
            stamp["interrupted"] = "interrupted: not all rounds, workloads and datasets are there"
    return Results(stamp, facts, rows, sorted(absent))


def _line_up(models: ModelsUnderTest, settings: Settings, around: Surroundings) -> list[Contestant]:
    if settings.device == "cpu":
        return line_up(models.artifacts, around.checkpoint, models.not_exported)
    if not around.gpu:
        raise BenchError("--device cuda: PyTorch sees no GPU here; `make bench-gpu` makes an environment for one")
    return cuda_line_up(models.artifacts, around.checkpoint, models.not_exported)


def _look_around(models: ModelsUnderTest, settings: Settings, *, speed: bool) -> Surroundings:
    spec = {"checkpoint": models.checkpoint, "pairs": models.pairs, "trust_remote_code": settings.trust_remote_code}
    try:
        with closing(RemoteWorker(settings.rivals_python)) as worker:
            theirs = worker.ask("versions", packages=PACKAGES)
        with closing(RemoteWorker()) as worker:
            ours = worker.ask("versions", packages=PACKAGES)
            checkpoint = worker.ask("fact", function="describe_checkpoint", spec=spec)["value"]
            check_weights(models, checkpoint["weights_sha256"])
            return Surroundings(
                ours=ours["versions"],
                theirs=theirs["versions"],
                theirs_python=theirs["python"],
                checkpoint={**spec, **checkpoint},
                gpu=worker.ask("cuda")["gpu"],
                flops=worker.ask("fact", function="flops_polynomial", spec=spec)["value"] if speed else [],
            )
    except WorkerError as error:
        needs = ", sbert-bench needs it: pip install 'sbert-infer[bench]'"
        missing = str(error).endswith("is not installed")
        raise BenchError(f"{error}{needs if missing else ''}") from error
    except OSError as error:
        raise BenchError(f"{settings.rivals_python} can't be run: {error.strerror}") from error


def _write_calibration(workloads: Mapping[str, Sequence[str]], folder: Path) -> str:
    """Write texts from every workload for rivals that calibrate their 8 bits; return the file."""
    texts = [text for given in workloads.values() for text in given] or make_workload("mixed", _CALIBRATION_TEXTS)
    file = folder / "calibration.json"
    file.write_text(json.dumps(texts[:: -(-len(texts) // _CALIBRATION_TEXTS)]), encoding="utf-8")
    return str(file)


def _run_workload(contest: Contest, name: str, texts: Sequence[Text], settings: Settings, progress: Progress) -> int:
    """Run the rounds of one workload. Return how many are complete: fewer after Ctrl-C."""
    contest.start_workload(texts)
    for entrant in contest.entrants:
        progress(f"{name}: warming up {entrant.contestant.name}")
        contest.warm_up(entrant)
    number = 0
    try:
        for number in range(settings.rounds):
            contest.measure_machine(usable_cores(), settings.device)
            for entrant in contest.turns(number):
                progress(f"{name}: round {number + 1} of {settings.rounds}, {entrant.contestant.name}")
                contest.turn(entrant)
            contest.compare()
    except KeyboardInterrupt:
        if not number:
            raise
        contest.keep_rounds(number)
        return number
    for entrant, places in contest.latency_turns(min(settings.latency_texts, len(texts))):
        progress(f"{name}: latency, text {places[0] + 1}, {entrant.contestant.name}")
        contest.latency_turn(entrant, places)
    return settings.rounds


def _measure_quality(
    contest: Contest, tasks: Sequence[Task], models: ModelsUnderTest, rows: list[Row], progress: Progress
) -> list[Row]:
    """Add quality to the rows, or to new ones if there are none."""
    found = evaluate(contest, tasks, models.artifacts[0].manifest, progress)
    rows = rows or score_quality(contest.entrants)
    failures = {entrant.contestant.name: entrant.failure for entrant in contest.entrants}
    for row in rows:
        row.quality = found.get(row.contestant.removesuffix(TUNED), {})  # a tuned entry has that of its library
        if row.status == "ok" and failures[row.contestant]:  # it failed after its speed was measured
            row.note = "; ".join(filter(None, [row.note, f"no quality: {failures[row.contestant]}"]))
    return rows


def _facts(
    name: str,
    texts: Sequence[Text],
    models: ModelsUnderTest,
    around: Surroundings,
    peaks: Mapping[str, Sequence[float]],
) -> WorkloadFacts:
    artifact, main = models.artifacts[0], next(iter(peaks))
    manifest = artifact.manifest
    prompt = manifest.prompts[manifest.default_prompt_name] if manifest.default_prompt_name else ""
    kind = PairTokenizer if models.pairs else Tokenizer
    tokenized = kind(artifact.tokenizer_json, manifest.max_length, manifest.truncation_side)(prepend(prompt, texts))
    return WorkloadFacts(
        name=name,
        texts=len(texts),
        tokens=int(tokenized.lengths.sum()),
        longest=int(tokenized.lengths.max()),
        truncated=int(np.count_nonzero(tokenized.truncated)),
        gflop=flops(tokenized.lengths, around.flops) / 1e9,
        peak_gflops=tuple(peaks[main]),
        peak_of=main.upper(),
        own_peaks={precision: tuple(found) for precision, found in peaks.items() if precision != main},
    )


def _stamp(models: ModelsUnderTest, settings: Settings, around: Surroundings) -> dict[str, Any]:
    separate = settings.rivals_python != sys.executable
    manifest = models.artifacts[0].manifest
    return {
        "model": models.name,
        "kind": manifest.kind,
        "weights_sha256": manifest.weights_sha256,
        "max_length": manifest.max_length,
        "gpu": around.gpu if settings.device == "cuda" else None,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "packages": around.ours,
        "rivals_python": around.theirs_python if separate else None,
        "rivals_packages": around.theirs if separate else None,
    }
