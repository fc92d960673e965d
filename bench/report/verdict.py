"""Turn what the rounds measured into rows of the table, and judge them right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from sbert_infer.bench.contest.lineup import MAX_ERROR, MIN_CORRELATION, MIN_COSINE, TUNED, file_mb
from sbert_infer.bench.contest.rounds import Entrant
from sbert_infer.bench.report.results import QUALITY, Row, WorkloadFacts
from sbert_infer.bench.stats import paired_ratio, percentiles


def score(entrants: Sequence[Entrant], facts: WorkloadFacts) -> list[Row]:
    """Make a row for each entrant; the first is the reference."""
    reference = _values(entrants[0], "seconds")
    rows = [_row(entrant, facts, reference) for entrant in entrants if not entrant.same_as_own]
    same = {entrant.contestant.name for entrant in entrants if entrant.same_as_own}
    for row in rows:
        if f"{row.contestant}{TUNED}" in same:
            row.note = "; ".join(filter(None, [row.note, "tuned gives the same configuration"]))
    return rows


def score_quality(entrants: Sequence[Entrant]) -> list[Row]:
    """Make rows without speed, for a run that measured quality alone."""
    rows = [_begin(QUALITY, entrant) for entrant in entrants]
    for row, entrant in zip(rows, entrants, strict=True):
        if row.status == "ok":
            _add_verdict(row, entrant)
    return rows


def _begin(workload: str, entrant: Entrant) -> Row:
    """Start a row with what is known before anything is measured."""
    contestant = entrant.contestant
    row = Row(workload, contestant.name, contestant.family, contestant.ours)
    row.load_s, row.note = entrant.load_s, entrant.note
    if entrant.failure:
        row.status, row.reason = "failed", entrant.failure
    else:
        row.file_mb = file_mb(contestant)
    return row


def _row(entrant: Entrant, facts: WorkloadFacts, reference: Sequence[float]) -> Row:
    contestant = entrant.contestant
    row = _begin(facts.name, entrant)
    row.batch_size = entrant.batch_size if contestant.tuned else contestant.own_batch_size
    if entrant.failure:
        return row
    row.seconds = _values(entrant, "seconds")
    row.latency_ms = percentiles(entrant.latencies_ms) if entrant.latencies_ms else {}
    middle = median(row.seconds)
    row.texts_per_s, row.tokens_per_s = facts.texts / middle, facts.tokens / middle
    row.texts_per_s_low, row.texts_per_s_high = facts.texts / max(row.seconds), facts.texts / min(row.seconds)
    row.cpu_s_per_1000 = 1000 / facts.texts * median(_values(entrant, "cpu_seconds"))
    row.peak_mb = max(_values(entrant, "peak_mb"))
    row.peak_share = _share(row.seconds, facts, facts.peak_gflops)
    if facts.own_peaks:
        row.own_peak_share = _share(row.seconds, facts, facts.own_peaks.get(row.family, facts.peak_gflops))
    row.padding = entrant.turns[-1]["padding"]
    _add_verdict(row, entrant)
    if row.status == "ok":
        row.speed_up = paired_ratio(reference, row.seconds)
    return row


def _share(seconds: Sequence[float], facts: WorkloadFacts, peaks: Sequence[float]) -> float | None:
    """Share of the peak that useful operations reach, paired by round; None if it is unknown."""
    if not peaks:
        return None
    return median([facts.gflop / mine / peak for mine, peak in zip(seconds, peaks, strict=True)])


def _add_verdict(row: Row, entrant: Entrant) -> None:
    """A row is right if every text or pair of every round was; NaN is wrong too."""
    (_judge_scores if entrant.differences else _judge_vectors)(row, entrant)


def _judge_scores(row: Row, entrant: Entrant) -> None:
    row.max_error = max(one.max_abs for one in entrant.differences)
    known = [one.correlation for one in entrant.differences if one.correlation is not None]
    row.correlation = min(known, default=1.0)
    spread, needed = entrant.differences[0].spread, MIN_CORRELATION[row.family]
    allowed = MAX_ERROR.get(row.family, np.inf) * spread
    if not (row.correlation >= needed and row.max_error <= allowed):
        row.status = "wrong"
        row.reason = (
            f"scores off by up to {row.max_error:.2g} at a standard deviation of {spread:.2g}, correlation "
            f"{row.correlation:.4f}; {row.family} needs {needed}"
        )
        if row.family in MAX_ERROR:
            row.reason += f" and errors of at most {allowed:.2g}"
        if not np.isfinite([row.max_error, row.correlation]).all():  # JSON has no NaN
            row.max_error = row.correlation = None
            row.reason = "some scores are NaN or infinite, or not as many as there are pairs and labels"


def _judge_vectors(row: Row, entrant: Entrant) -> None:
    together = np.concatenate(entrant.cosines)
    row.min_cosine, row.mean_cosine = float(together.min()), float(together.mean())
    needed = MIN_COSINE[row.family]
    if not row.min_cosine >= needed:
        row.status = "wrong"
        row.reason = f"cosine with the reference down to {row.min_cosine:.4f}, {row.family} needs {needed}"
        if not np.isfinite(together).all():  # JSON has no NaN
            row.min_cosine = row.mean_cosine = None
            row.reason = "some vectors hold NaN or infinity"


def _values(entrant: Entrant, key: str) -> list[Any]:
    return [turn[key] for turn in entrant.turns]
