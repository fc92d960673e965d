"""A whole run: the line-up, the workloads, the scores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbert_infer._util.cores import usable_cores
from sbert_infer.bench.contest.lineup import PACKAGES, Contestant, line_up, not_installed
from sbert_infer.bench.contest.models_under_test import Subject, check_weights
from sbert_infer.bench.contest.process import RemoteWorker
from sbert_infer.bench.contest.rounds import Meeting
from sbert_infer.bench.errors import BenchError, WorkerError
from sbert_infer.bench.quality.evaluate import add_quality, examine, make_tasks
from sbert_infer.bench.quality.tasks import Task
from sbert_infer.bench.report.machine import machine_stamp
from sbert_infer.bench.report.results import QUALITY, Results, Row, WorkloadFacts
from sbert_infer.bench.report.verdict import score, score_quality
from sbert_infer.bench.stats import flops
from sbert_infer.bench.workloads import make_pairs
from sbert_infer.text.inputs import Text, prepend
from sbert_infer.text.pair_tokenizer import PairTokenizer
from sbert_infer.text.tokenizer import Tokenizer

__all__ = ["Settings", "run_session"]


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


def run_session(
    subject: Subject,
    workloads: Mapping[str, Sequence[str]],
    settings: Settings,
    folder: Path,
    progress: Callable[[str], object] = lambda line: None,
    extra: Sequence[Contestant] = (),
) -> Results:
    """Measure everyone on every workload, given as name and texts, and on the datasets that `settings` names.

    Without a workload, quality alone. `folder` takes temporary files; `extra` contestants are for
    tests. Ctrl-C ends it with what there is, if a round of the first workload is through.
    """
    tasks = make_tasks(subject, settings.sts, settings.pairs, settings.beir)
    progress("looking around")
    about = _look_around(subject, settings, speed=bool(workloads))
    everyone = [*line_up(subject.artifacts, about["checkpoint"], about["cuda"]), *extra]
    absent = not_installed(everyone, about["ours"], about["theirs"])
    chosen = _chosen(everyone, absent, settings.only)
    stamp = {**machine_stamp(), **_stamp(subject, settings, about), "workloads": list(workloads)}
    stamp[QUALITY] = [task.describe() for task in tasks]
    with Meeting(folder, settings.rivals_python, pairs=subject.pairs) as meeting:
        for contestant in chosen if workloads else [one for one in chosen if one.own_quality]:
            progress(f"loading {contestant.name}")
            meeting.enter(contestant)
        facts: list[WorkloadFacts] = []
        rows: list[Row] = []
        try:
            for name, given in workloads.items():
                texts = make_pairs(given) if subject.pairs else given
                rounds = _run_workload(meeting, name, texts, settings, progress)
                facts.append(_facts(name, texts, subject, about["flops"], meeting.peak_gflops))
                rows += score(meeting.entrants, facts[-1])
                if rounds < settings.rounds:
                    raise KeyboardInterrupt
            rows = _measure_quality(meeting, tasks, subject, rows, progress)
        except KeyboardInterrupt:  # what was measured so far is worth having
            if not rows:
                raise
            stamp["interrupted"] = "interrupted: not all rounds, workloads and datasets are there"
    return Results(stamp, facts, rows, sorted(absent))


def _measure_quality(
    meeting: Meeting, tasks: Sequence[Task], subject: Subject, rows: list[Row], progress: Callable[[str], object]
) -> list[Row]:
    """The rows with their quality; if there are none yet, new ones."""
    found = examine(meeting, tasks, subject.artifacts[0].manifest, progress)
    rows = rows or score_quality(meeting.entrants)
    add_quality(rows, found)
    failures = {entrant.contestant.name: entrant.failure for entrant in meeting.entrants}
    for row in rows:
        if row.status == "ok" and failures[row.contestant]:  # its speed was measured before
            row.note = "; ".join(filter(None, [row.note, f"no quality: {failures[row.contestant]}"]))
    return rows


def _run_workload(
    meeting: Meeting, name: str, texts: Sequence[Text], settings: Settings, progress: Callable[[str], object]
) -> int:
    """How many rounds were measured: fewer than asked for after Ctrl-C."""
    meeting.start_workload(texts)
    for entrant in meeting.entrants:
        progress(f"{name}: warming up {entrant.contestant.name}")
        meeting.warm_up(entrant)
    number = 0
    try:
        for number in range(settings.rounds):
            meeting.measure_machine(usable_cores())
            for entrant in meeting.turns(number):
                progress(f"{name}: round {number + 1} of {settings.rounds}, {entrant.contestant.name}")
                meeting.turn(entrant)
            meeting.compare()
    except KeyboardInterrupt:
        if not number:
            raise
        meeting.keep_rounds(number)
        return number
    for entrant, places in meeting.latency_turns(min(settings.latency_texts, len(texts))):
        progress(f"{name}: latency, text {places[0] + 1}, {entrant.contestant.name}")
        meeting.latency_turn(entrant, places)
    return settings.rounds


def _chosen(everyone: Sequence[Contestant], absent: set[str], only: Sequence[str]) -> list[Contestant]:
    """Those installed and asked for, each rival followed by its tuned twin. The reference always takes part."""
    chosen = [
        one
        for place, one in enumerate(everyone)
        if one.name not in absent and (place == 0 or not only or any(part in one.name for part in only))
    ]
    if only and len(chosen) == 1 and not any(part in chosen[0].name for part in only):
        names = ", ".join(one.name for one in everyone if one.name not in absent)
        raise BenchError(f"--only {' --only '.join(only)} leaves nobody; there are: {names}")
    return [entry for one in chosen for entry in ([one, one.tuned_twin()] if one.tunable else [one])]


def _look_around(subject: Subject, settings: Settings, *, speed: bool) -> dict[str, Any]:
    """What the two interpreters hold, and facts about the checkpoint that only torch can tell."""
    spec = {
        "checkpoint": subject.checkpoint,
        "pairs": subject.pairs,
        "trust_remote_code": settings.trust_remote_code,
    }
    try:
        with closing(RemoteWorker(settings.rivals_python)) as worker:
            theirs = worker.ask("versions", packages=PACKAGES)
        with closing(RemoteWorker()) as worker:
            ours = worker.ask("versions", packages=PACKAGES)
            checkpoint = worker.ask("describe", spec=spec)["checkpoint"]
            check_weights(subject, checkpoint["weights_sha256"])
            return {
                "theirs": theirs["versions"],
                "theirs_python": theirs["python"],
                "ours": ours["versions"],
                "checkpoint": {**spec, **checkpoint},
                "cuda": worker.ask("cuda"),
                "flops": worker.ask("flops", spec=spec)["coefficients"] if speed else [],
            }
    except WorkerError as error:
        raise BenchError(str(error)) from error
    except OSError as error:
        raise BenchError(f"{settings.rivals_python} can't be run: {error.strerror}") from error


def _facts(
    name: str, texts: Sequence[Text], subject: Subject, coefficients: Sequence[float], peaks: Sequence[float]
) -> WorkloadFacts:
    artifact = subject.artifacts[0]
    manifest = artifact.manifest
    prompt = manifest.prompts[manifest.default_prompt_name] if manifest.default_prompt_name else ""
    kind = PairTokenizer if subject.pairs else Tokenizer
    tokenized = kind(artifact.tokenizer_json, manifest.max_length, manifest.truncation_side)(prepend(prompt, texts))
    return WorkloadFacts(
        name=name,
        texts=len(texts),
        tokens=int(tokenized.lengths.sum()),
        longest=int(tokenized.lengths.max()),
        truncated=int(np.count_nonzero(tokenized.truncated)),
        gflop=flops(tokenized.lengths, coefficients) / 1e9,
        peak_gflops=tuple(peaks),
    )


def _stamp(subject: Subject, settings: Settings, about: Mapping[str, Any]) -> dict[str, Any]:
    separate = settings.rivals_python != sys.executable
    return {
        "model": subject.name,
        "kind": subject.artifacts[0].manifest.kind,
        "weights_sha256": subject.artifacts[0].manifest.weights_sha256,
        "max_length": subject.artifacts[0].manifest.max_length,
        "rounds": settings.rounds,
        "seed": settings.seed,
        "packages": about["ours"],
        "rivals_python": about["theirs_python"] if separate else None,
        "rivals_packages": about["theirs"] if separate else None,
    }
