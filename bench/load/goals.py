"""What a good server should reach, and whether this one does.

Shares and ratios are medians over the rounds: what is compared was measured minutes apart, so slow
spells of the machine cancel out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from sbert_infer.bench.load.results import LONE, SATURATION, LoadResults, LoadRow
from sbert_infer.bench.stats import round_ratios

_FLAT = 1.1  # memory after an overload, against before it


@dataclass(frozen=True)
class Goal:
    """A figure of one server and what it should be. `met` is None where there is no goal."""

    what: str
    value: str
    wanted: str = ""
    met: bool | None = None


def goals(results: LoadResults, server: str) -> list[Goal]:
    """List a server's figures, as far as they were measured."""
    rows = {row.level: row for row in results.of(server)}
    lone, most = rows.get(LONE), rows.get(SATURATION)
    watched = [row for row in rows.values() if row.watched_s is not None]
    overload = max(watched, key=lambda row: row.offered_per_s or 0, default=None)
    found = [*_saturation(results, most), *_latency(lone, rows.get("70%"))]
    if most is not None and overload is not None:
        found += _under_overload(most, overload)
    wrong = sum(row.wrong_texts for row in rows.values())
    return [*found, Goal("wrong vectors", f"{wrong:,}", "0", wrong == 0)]


def _saturation(results: LoadResults, most: LoadRow | None) -> Iterator[Goal]:
    if most is None:
        return
    yield Goal("most correct responses", f"{most.goodput_per_s:,.1f} requests/s, {most.texts_per_s:,.1f} texts/s")
    if shares := round_ratios(most.texts_rounds, results.offline_rounds):
        value = f"{median(shares):.0%}{_range(shares, '{:.0%}')}"
        yield Goal("of the speed without a server", value, ">= 90%", median(shares) >= 0.9)


def _latency(lone: LoadRow | None, busy: LoadRow | None) -> Iterator[Goal]:
    if lone is None or not lone.latency_ms:
        return
    alone = lone.latency_ms["p99"]
    yield Goal("p99 of a lone request", f"{alone:.1f} ms")
    if busy is not None and (ratios := round_ratios(busy.p99_rounds, lone.p99_rounds)):
        times = f"{median(ratios):.1f}x the lone one{_range(ratios, '{:.1f}x')}"
        met = median(ratios) <= 4 and busy.keeps_up
        yield Goal("p99 at 70% load", f"{busy.latency_ms['p99']:.1f} ms, {times}", "<= 4x", met)


def _under_overload(most: LoadRow, overload: LoadRow) -> Iterator[Goal]:
    shares = round_ratios(overload.goodput_rounds, most.goodput_rounds) or [0.0]
    value = f"{median(shares):.0%} of the most{_range(shares, '{:.0%}')}"
    yield Goal(f"goodput at {overload.level} load", value, ">= 80%", median(shares) >= 0.8)
    if overload.refusal_ms:
        slowest = overload.refusal_ms["max"]
        value = f"{slowest:.1f} ms (p99 {overload.refusal_ms['p99']:.1f})"
        yield Goal("slowest refusal", value, "< 50 ms", slowest < 50)
    else:
        yield Goal("slowest refusal", "it refused nothing")
    recovered = overload.recovery_s
    value = f"{recovered:.2f} s" if recovered is not None else f"not within {overload.watched_s:g} s"
    yield Goal("recovery", value, "< 2 s", recovered is not None and recovered < 2)
    if most.memory_mb and overload.memory_mb:
        value = f"{most.memory_mb:,.0f} MB, after the overload {overload.memory_mb:,.0f} MB"
        yield Goal("memory", value, "flat", overload.memory_mb <= _FLAT * most.memory_mb)


def _range(values: Sequence[float], pattern: str) -> str:
    """Range over the rounds, if there are several."""
    return f" ({pattern.format(min(values))} to {pattern.format(max(values))})" if len(values) > 1 else ""
