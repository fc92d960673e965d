"""Latency and goodput against load, as inline SVG. Each server has a colour class, s0 to s4."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from sbert_infer.bench.load.results import SATURATION, LoadResults, LoadRow
from sbert_infer.bench.report.charts import WIDTH, axis_text, nice_ticks, svg
from sbert_infer.bench.stats import PERCENTILES

__all__ = ["COLOURS", "goodput_chart", "latency_against_load"]

COLOURS = 5
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 70, 60, 30, 50
_BEYOND = 1.5  # times saturation: heavier loads would squeeze all others into a corner

Scale = Callable[[float], float]


def latency_against_load(results: LoadResults) -> str:
    """p50, p95 and p99 of each server over the load, in milliseconds on a logarithmic axis; saturation is marked."""
    curves = {name: _shown(results, name) for name in results.names}
    points = [row for rows in curves.values() for row in rows]
    if not points:
        return ""
    marks = {name: row.goodput_per_s for name in results.names if (row := results.row(name, SATURATION))}
    x, xs = _linear(max([*(row.offered_per_s or 0 for row in points), *marks.values()]), _LEFT, WIDTH - _RIGHT)
    values = [row.latency_ms[f"p{rank}"] for row in points for rank in PERCENTILES]
    y, ys = _logarithmic(min(values), max(values))
    parts = _axes(x, xs, y, ys, "offered load, requests per second", "milliseconds from when a request was due")
    if results.p99_bound_ms and ys[0] <= results.p99_bound_ms <= ys[-1]:
        at = y(results.p99_bound_ms)
        parts.append(f'<path class="bound" d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(axis_text(WIDTH - _RIGHT, at - 5, f"bound {results.p99_bound_ms:,.1f} ms", "end"))
    for place, name in enumerate(results.names):
        if name in marks:
            parts += _mark(place, x(marks[name]), f"{name}: {marks[name]:,.1f}/s at most")
        for rank in PERCENTILES:
            parts += _curve(f"s{place % COLOURS} p{rank}", curves[name], x, y, f"p{rank}")
    return svg(_HEIGHT, "Latency against load", parts)


def goodput_chart(results: LoadResults) -> str:
    """Right answers per second over the load, overload included; a server that holds up stays level."""
    rows = [row for row in results.rows if row.offered_per_s]
    if not rows:
        return ""
    x, xs = _logarithmic_x(min(row.offered_per_s or 1 for row in rows), max(row.offered_per_s or 1 for row in rows))
    y, ys = _linear(max(row.goodput_per_s for row in rows), _HEIGHT - _BOTTOM, _TOP)
    parts = _axes(x, xs, y, ys, "offered load, requests per second, logarithmic", "right answers per second")
    for place, name in enumerate(results.names):
        mine = sorted((row for row in rows if row.server == name), key=lambda row: row.offered_per_s or 0)
        dots = [(x(row.offered_per_s or 1), y(row.goodput_per_s), row) for row in mine]
        parts += _line(f"s{place % COLOURS} p99", dots, lambda row: f"{row.goodput_per_s:,.1f} right answers/s")
    return svg(_HEIGHT, "Goodput against load", parts)


def _shown(results: LoadResults, name: str) -> list[LoadRow]:
    most = results.row(name, SATURATION)
    limit = math.inf if most is None else _BEYOND * max(most.answered_per_s, 1e-9)
    rows = [row for row in results.of(name) if row.offered_per_s and row.latency_ms and row.offered_per_s <= limit]
    return sorted(rows, key=lambda row: row.offered_per_s or 0)


def _curve(kind: str, rows: Sequence[LoadRow], x: Scale, y: Scale, percentile: str) -> list[str]:
    dots = [(x(row.offered_per_s or 0), y(row.latency_ms[percentile]), row) for row in rows]
    return _line(kind, dots, lambda row: f"{percentile} {row.latency_ms[percentile]:,.1f} ms")


def _line(kind: str, dots: Sequence[tuple[float, float, LoadRow]], tell: Callable[[LoadRow], str]) -> list[str]:
    """A curve with a dot for each level, hollow where the server did not keep up."""
    path = "L".join(f"{left:.1f} {top:.1f}" for left, top, _ in dots)
    parts = [f'<path class="curve {kind}" d="M{path}"/>'] if dots else []
    for left, top, row in dots:
        hollow = "" if row.keeps_up else " hollow"
        text = f"{row.server} at {row.level}, {row.offered_per_s:,.1f} requests/s: {tell(row)}"
        circle = f'<circle class="dot {kind}{hollow}" cx="{left:.1f}" cy="{top:.1f}" r="4"/>'
        parts.append(f"<g><title>{escape(text)}</title>{circle}</g>")
    return parts


def _mark(place: int, x: float, text: str) -> list[str]:
    line = f'<path class="saturation s{place % COLOURS}" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
    return [line, axis_text(x - 6, _HEIGHT - _BOTTOM - 8 - 15 * place, text, "end")]


def _axes(x: Scale, xs: Sequence[float], y: Scale, ys: Sequence[float], below: str, above: str) -> list[str]:
    parts = []
    for tick in xs:
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(axis_text(x(tick), _HEIGHT - _BOTTOM + 18, f"{tick:,g}", "middle"))
    for tick in ys:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(axis_text(_LEFT - 8, y(tick) + 4, f"{tick:,g}", "end"))
    parts.append(axis_text(WIDTH - _RIGHT, _HEIGHT - 8, below, "end"))
    parts.append(axis_text(_LEFT, 14, above, "start"))
    return parts


def _linear(top: float, start: float, end: float) -> tuple[Scale, list[float]]:
    """From 0 at `start` to `top` or a little more at `end`."""
    ticks = nice_ticks(top)
    return lambda value: start + (end - start) * value / ticks[-1], ticks


def _logarithmic(low: float, high: float) -> tuple[Scale, list[float]]:
    return _log_scale(low, high, _HEIGHT - _BOTTOM, _TOP)


def _logarithmic_x(low: float, high: float) -> tuple[Scale, list[float]]:
    return _log_scale(low, high, _LEFT, WIDTH - _RIGHT)


def _log_scale(low: float, high: float, start: float, end: float) -> tuple[Scale, list[float]]:
    """From the last of 1, 2, 5, 10, ... that is not above `low` to the first that is not below `high`."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    first = max(step for step in steps if step <= low)
    last = min(step for step in steps if step >= high and step > first)
    span = math.log(last / first)
    ticks = [step for step in steps if first <= step <= last]
    return lambda value: start + (end - start) * math.log(value / first) / span, ticks
