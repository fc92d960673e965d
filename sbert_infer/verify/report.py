"""The report of `sbert-verify`: plain values, which `--json` prints, and the same for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from sbert_infer.artifact.canaries import Canaries, canaries_of
from sbert_infer.artifact.manifest import RERANKER
from sbert_infer.base_engine import BaseEngine
from sbert_infer.encode.self_check import FINITE, LENGTH, NO_CANARIES, RIGHT, Verdict, judge, run_canaries
from sbert_infer.engine import Engine
from sbert_infer.similarity import cosine
from sbert_infer.verify.compare import Comparison, Difference
from sbert_infer.verify.texts import by_cosine
from sbert_infer.verify.truth import Stated

SCHEMA = 1  # raise it when a key is renamed or removed
HERE = "this machine"
_WORST = 3  # texts that are shown
_WIDTH = 13  # of the first column


def report_here(engine: BaseEngine) -> dict[str, Any]:
    """Run the artifact's canaries on `engine`, and compare them with the eager model's vectors.

    Of a file with several routes, all are run; the report is that of the first one that is wrong.
    """
    reports = [_report_route(engine, HERE)]
    if isinstance(engine, Engine):
        routes = engine.manifest.other_routes or {}
        reports += [_report_route(engine.for_task(task), f"{HERE}, route {task}") for task in routes]
    return next((report for report in reports if report["verdict"] != RIGHT), reports[0])


def _report_route(engine: BaseEngine, target: str) -> dict[str, Any]:
    canaries = canaries_of(engine.artifact)
    if canaries is None:
        return _report(engine, target, Verdict(NO_CANARIES), [], [], [])
    found = run_canaries(engine.pipeline, engine.manifest, canaries)
    verdict = judge(engine.manifest, engine.device, canaries, found)
    cosines = [_lowest(result, canaries.results[row]) for row, result in found]
    texts = [_shown(canaries, row) for row, _ in found]
    alone = judge(engine.manifest, engine.device, canaries, found[len(canaries.texts) :])
    return _report(engine, target, verdict, texts, cosines, _differences(verdict, alone))


def report_target(
    engine: BaseEngine, target: str, texts: Sequence[str], found: Comparison, stated: Stated | None
) -> dict[str, Any]:
    """Report how the vectors of a server or a file compare with those of `engine`."""
    report = _report(engine, target, found.verdict, texts, list(found.cosines), found.differences)
    return {**report, "stated": None if stated is None else stated.compared(engine.fingerprint)}


def _report(
    engine: BaseEngine,
    target: str,
    verdict: Verdict,
    texts: Sequence[str],
    cosines: Sequence[float],
    differences: Sequence[Difference],
) -> dict[str, Any]:
    scores = engine.manifest.kind == RERANKER or not len(cosines)
    fingerprint = engine.fingerprint
    return {
        "schema": SCHEMA,
        "artifact": engine.artifact.path.name,
        "model": engine.manifest.name,
        "precision": engine.manifest.precision,
        "fingerprint": {"model": fingerprint.model, "exact": fingerprint.exact},
        "backend": engine.pipeline.backend.describe(),
        "target": target,
        "stated": None,
        **asdict(verdict),
        "lowest_cosine": None if scores else float(min(cosines)),
        "mean_cosine": None if scores else float(np.mean(cosines)),
        "differences": [asdict(each) for each in differences],
        "worst": [] if scores or verdict.verdict == RIGHT else by_cosine(texts, cosines, _WORST),
    }


def _lowest(result: Any, right: Any) -> float:
    same = result.shape == right.shape and np.isfinite(result).all()
    return float(cosine(result, right).min(initial=1)) if same else 0.0


def _shown(canaries: Canaries, row: int) -> str:
    text = canaries.texts[row]
    return text if isinstance(text, str) else " / ".join(text)


def _differences(verdict: Verdict, alone: Verdict) -> list[Difference]:
    """Return what is wrong with the vectors of this machine."""
    if verdict.verdict == RIGHT:
        return []
    if alone.verdict == RIGHT:
        return [Difference("batching", "texts that run alone are right, those that run together are not")]
    if verdict.measure == LENGTH:
        return [Difference("normalisation", "vectors point the right way, but have other lengths")]
    if verdict.measure == FINITE:
        return [Difference("arithmetic", "the model gives NaN or infinity here")]
    how = "not the weights that were exported, or they are not computed as they should be"
    return [Difference("weights or arithmetic", how)]


def render(report: dict[str, Any]) -> str:
    """Return the report as lines of text."""
    right = report["verdict"] == RIGHT
    names = ("verdict", "texts", "measure", "found", "bound")
    verdict = str(Verdict(**{name: report[name] for name in names}))
    rows = [
        ("artifact", f"{report['artifact']}: {report['model']}, {report['precision']}"),
        ("fingerprint", f"{report['fingerprint']['exact']} (model {report['fingerprint']['model']})"),
        ("runs with", report["backend"]),
        ("compared", report["target"]),
        ("verdict", click.style(verdict, fg="green" if right else "red")),
    ]
    if report["stated"] is not None:
        rows.insert(-1, ("it states", _stated(report["stated"])))
    if report["mean_cosine"] is not None:
        rows.append(("cosines", f"lowest {report['lowest_cosine']:.7f}, mean {report['mean_cosine']:.7f}"))
    rows += [("differs", f"{each['what']}: {each['how']}") for each in report["differences"]]
    rows += [("worst", f"{each['cosine']:.6f}  {each['text']}") for each in report["worst"]]
    if report["verdict"] == NO_CANARIES:
        rows.append(("cure", "export it again: it was made before artifacts had canaries"))
    return "\n".join(f"{name:<{_WIDTH}} {text}" for name, text in rows)


def _stated(stated: dict[str, Any]) -> str:
    """Return what the target's own fingerprint says, whatever its vectors are."""
    if stated["same"]:
        return "the same fingerprint"
    parts = f": other {', '.join(stated['differences'])}" if stated["differences"] else ""
    return click.style(f"the fingerprint {stated['exact']}, not this one{parts}", fg="yellow")
