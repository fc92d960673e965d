"""The report of `sbert-tune`: plain values, which `--json` prints, and the same for people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from sbert_infer import __version__
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.artifact.manifest import Artifact
from sbert_infer.backends.choice import Choice, conditions
from sbert_infer.tune.candidates import file_of
from sbert_infer.tune.search import Found
from sbert_infer.tune.trial import Trial
from sbert_infer.tune.workload import Workload

SCHEMA = 1  # raise it when a key is renamed or removed


def make_report(
    artifact: Artifact, workload: Workload, found: Found, min_cosine: float, choice: Choice | None, error: str | None
) -> dict[str, Any]:
    """Return everything that was found."""
    return {
        "schema": SCHEMA,
        "sbert_infer": __version__,
        "artifact": artifact.path.name,
        "model": artifact.manifest.name,
        "fingerprint": fingerprint(artifact).model,
        "min_cosine": min_cosine,
        "texts": {"source": workload.source, "count": found.texts},
        "conditions": conditions(),
        "tried": [_entry(trial, is_best=trial is found.best) for trial in found.trials],
        "choice": None if choice is None else asdict(choice),
        "error": error,
    }


def _entry(trial: Trial, *, is_best: bool) -> dict[str, Any]:
    options = trial.candidate.options
    return {
        "file": file_of(trial.candidate),
        "precision": trial.candidate.artifact.manifest.precision,
        "backend": trial.backend,
        "device": options.device,
        "workers": options.workers,
        "threads": options.threads,
        "max_batch_tokens": trial.max_batch_tokens,
        "cosine": trial.cosine,
        "texts_per_s": trial.texts_per_s,
        "ratio": trial.ratio if trial.ratios else None,
        "ratios": trial.ratios,
        "left_out": trial.left_out or None,
        "chosen": is_best,
    }


def render(report: dict[str, Any]) -> str:
    """Return the report as lines of text."""
    names = ("", "file", "runs with", "tokens", "cosine", "texts/s", "ratio", "")
    rows = [names, *map(_row, report["tried"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names) - 1)]
    lines = [_line(row, widths) for row in rows]
    for at, entry in enumerate(report["tried"], 1):
        if entry["chosen"]:
            lines[at] = click.style(lines[at], fg="green")
    texts = f"{report['texts']['count']:,} texts a round ({report['texts']['source']})"
    lines += ["", f"ratio: to the first line, median (lowest to highest) of rounds in turns, {texts}"]
    if report["error"]:
        return "\n".join(lines)
    choice = Choice(**report["choice"])
    lines += [f"chosen: {choice}", f'used by: Engine("{report["artifact"]}", compute="auto"), on this machine']
    return "\n".join(lines)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    cosine = "-" if entry["cosine"] is None else f"{entry['cosine']:.7f}"
    mark = "*" if entry["chosen"] else ""
    known = (mark, entry["file"], entry["backend"] or "-", str(entry["max_batch_tokens"] or "-"), cosine)
    speed = "-" if entry["texts_per_s"] is None else f"{entry['texts_per_s']:,.0f}"
    if entry["ratio"] is None:
        return (*known, speed, "-", f"left out: {entry['left_out']}")
    ratio = f"{entry['ratio']:.2f} ({min(entry['ratios']):.2f} to {max(entry['ratios']):.2f})"
    return (*known, speed, ratio, f"left out: {entry['left_out']}" if entry["left_out"] else "")


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    mark, file, backend, *numbers, note = row
    text = [f"{mark:<{widths[0]}}", f"{file:<{widths[1]}}", f"{backend:<{widths[2]}}"]
    text += [f"{number:>{width}}" for number, width in zip(numbers, widths[3:], strict=True)]
    return "  ".join([*text, note]).rstrip()
