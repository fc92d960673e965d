"""Compare servers by their latency as a function of load. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sbert_infer.bench.load.results import SATURATION, LoadResults, LoadRow
from sbert_infer.bench.stats import round_ratios

EQUAL_LOAD = 0.7  # share of the slowest server's saturation at which p99s are compared
_CALM = 10  # responses in a row that must be as fast as usual for a server to have recovered


@dataclass(frozen=True)
class Comparison:
    """The first server against another; a ratio above 1 means that the first is ahead."""

    server: str  # the other
    saturation: float | None  # ratio of correct responses per second at saturation
    equal_load_per_s: float | None
    p99_ms: tuple[float | None, float | None]  # at that load, of the first and the other
    p99: float | None  # ratio
    loads_per_s: tuple[float | None, float | None]  # up to which p99 stays within the bound
    within_bound: float | None  # ratio; inf: the other's p99 never is


def compare_servers(results: LoadResults) -> list[Comparison]:
    """Compare the first server with each of the others."""
    first, *others = results.names
    rates = [row.goodput_per_s for row in results.rows if row.level == SATURATION]
    load = EQUAL_LOAD * min(rates) if len(rates) == len(results.names) else None
    return [_compare(results, first, other, load) for other in others]


def load_within(rows: Sequence[LoadRow], bound_ms: float) -> float:
    """Highest load, in requests per second, at which p99 is within the bound; 0 if it never is.

    The logarithm of p99 is interpolated linearly between measured loads. Where a server does not
    keep up with its load, no bound is met, and no load counts beyond the most it ever handled.
    """
    points = _curve(rows)
    inside = [place for place, (_, p99) in enumerate(points) if p99 <= bound_ms]
    if not inside:
        return 0.0
    load, p99 = points[inside[-1]]
    after = points[inside[-1] + 1 :]
    if after and math.isfinite(after[0][1]):
        load += (after[0][0] - load) * math.log(bound_ms / p99) / math.log(after[0][1] / p99)
    return min(load, max(row.goodput_per_s for row in rows))


def p99_at(rows: Sequence[LoadRow], load: float) -> float | None:
    """p99 in ms at a load between two measured ones, interpolated as above; None outside."""
    points = [point for point in _curve(rows) if math.isfinite(point[1])]
    for (low, p99), (high, p99_high) in itertools.pairwise(points):
        if low <= load <= high:
            return float(p99 * (p99_high / p99) ** ((load - low) / (high - low)))
    return None


def recovery_time(probes: Sequence[tuple[float, float | None]], normal_s: float) -> float | None:
    """Seconds until responses are as fast as usual again; None if they never are.

    `probes` are pairs of when a request was sent, in seconds since the overload ended, and how long
    its response took, None without one.
    """
    calm = 0
    for place, (_, latency_s) in enumerate(probes):
        calm = calm + 1 if latency_s is not None and latency_s <= normal_s else 0
        if calm == _CALM:
            first = place - _CALM + 1
            return probes[first][0] if first else 0.0
    return None


def _curve(rows: Sequence[LoadRow]) -> list[tuple[float, float]]:
    """List (load, p99 in ms) by rising load, p99 infinite where the server does not keep up."""
    return sorted(
        (row.offered_per_s, row.latency_ms["p99"] if row.keeps_up and row.latency_ms else math.inf)
        for row in rows
        if row.offered_per_s is not None
    )


def _compare(results: LoadResults, first: str, other: str, load: float | None) -> Comparison:
    mine, theirs = results.of(first), results.of(other)
    p99_ms = (None, None) if load is None else (p99_at(mine, load), p99_at(theirs, load))
    within: tuple[float | None, float | None] = (None, None)
    if results.p99_bound_ms is not None and any(row.offered_per_s for row in mine):
        within = load_within(mine, results.p99_bound_ms), load_within(theirs, results.p99_bound_ms)
    rounds = [row.goodput_rounds for rows in (mine, theirs) for row in rows if row.level == SATURATION]
    ratios = round_ratios(*rounds) if len(rounds) == 2 else []
    return Comparison(
        server=other,
        saturation=median(ratios) if ratios else None,  # slow spells of the machine cancel out in each round's ratio
        equal_load_per_s=load,
        p99_ms=p99_ms,
        p99=_ratio(p99_ms[1], p99_ms[0]),
        loads_per_s=within,
        within_bound=_ratio(*within),
    )


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or denominator is None or not (numerator or denominator):
        return None
    return numerator / denominator if denominator else math.inf
