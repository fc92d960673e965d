"""Latency and goodput against load, as inline SVG. Each server has a colour class, s0 to s4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from sbert_infer.bench.load.results import SATURATION, LoadResults, LoadRow
from sbert_infer.bench.report.svg_parts import WIDTH, Frame, axis_text, linear_scale, log_scale, nice_ticks, svg
from sbert_infer.bench.stats import PERCENTILES

COLOURS = 5
_FRAME = Frame(height=440)
_BEYOND = 1.5  # times saturation: heavier loads would squeeze all others into a corner
_LOAD = "offered load, requests per second"


def latency_against_load(results: LoadResults) -> str:
    """Plot each server's p50, p95 and p99 over the load, in logarithmic ms; mark its saturation."""
    curves = {name: _shown(results, name) for name in results.names}
    points = [row for rows in curves.values() for row in rows]
    if not points:
        return ""
    marks = {name: row.goodput_per_s for name in results.names if (row := results.row(name, SATURATION))}
    xs = nice_ticks(max([*(row.offered_per_s or 0 for row in points), *marks.values()]))
    x = linear_scale(0, xs[-1], _FRAME.across)
    values = [row.latency_ms[f"p{rank}"] for row in points for rank in PERCENTILES]
    y, ys = log_scale(min(values), max(values), _FRAME.upwards)
    parts = _FRAME.axes(x, xs, y, ys, _LOAD, "milliseconds from when a request was due")
    if results.p99_bound_ms and ys[0] <= results.p99_bound_ms <= ys[-1]:
        at = y(results.p99_bound_ms)
        parts.append(f'<path class="bound" d="M{_FRAME.left} {at:.1f}H{WIDTH - _FRAME.right}"/>')
        parts.append(axis_text(WIDTH - _FRAME.right, at - 5, f"bound {results.p99_bound_ms:,.1f} ms", "end"))
    for place, name in enumerate(results.names):
        if name in marks:
            at, low = x(marks[name]), _FRAME.height - _FRAME.bottom
            parts.append(f'<path class="saturation s{place % COLOURS}" d="M{at:.1f} {_FRAME.top}V{low}"/>')
            parts.append(axis_text(at - 6, low - 8 - 15 * place, f"{name}: {marks[name]:,.1f}/s at most", "end"))
        for rank in PERCENTILES:
            latencies = [row.latency_ms[f"p{rank}"] for row in curves[name]]
            dots = [
                (x(row.offered_per_s or 0), y(latency), row, f"p{rank} {latency:,.1f} ms")
                for row, latency in zip(curves[name], latencies, strict=True)
            ]
            parts += _line(f"s{place % COLOURS} p{rank}", dots)
    return svg(_FRAME.height, "Latency against load", parts)


def goodput_chart(results: LoadResults) -> str:
    """Plot correct responses per second over the load, overload included."""
    rows = [row for row in results.rows if row.offered_per_s]
    if not rows:
        return ""
    loads = [row.offered_per_s or 1 for row in rows]
    x, xs = log_scale(min(loads), max(loads), _FRAME.across)
    ys = nice_ticks(max(row.goodput_per_s for row in rows))
    y = linear_scale(0, ys[-1], _FRAME.upwards)
    parts = _FRAME.axes(x, xs, y, ys, f"{_LOAD}, logarithmic", "correct responses per second")
    for place, name in enumerate(results.names):
        mine = sorted((row for row in rows if row.server == name), key=lambda row: row.offered_per_s or 0)
        dots = [
            (x(row.offered_per_s or 1), y(row.goodput_per_s), row, f"{row.goodput_per_s:,.1f} correct responses/s")
            for row in mine
        ]
        parts += _line(f"s{place % COLOURS} p99", dots)
    return svg(_FRAME.height, "Goodput against load", parts)


def _shown(results: LoadResults, name: str) -> list[LoadRow]:
    most = results.row(name, SATURATION)
    limit = math.inf if most is None else _BEYOND * max(most.answered_per_s, 1e-9)
    rows = [row for row in results.of(name) if row.offered_per_s and row.latency_ms and row.offered_per_s <= limit]
    return sorted(rows, key=lambda row: row.offered_per_s or 0)


def _line(kind: str, dots: Sequence[tuple[float, float, LoadRow, str]]) -> list[str]:
    """Draw a curve with a dot for each level, hollow where the server did not keep up."""
    path = "L".join(f"{left:.1f} {top:.1f}" for left, top, _, _ in dots)
    parts = [f'<path class="curve {kind}" d="M{path}"/>'] if dots else []
    for left, top, row, figure in dots:
        hollow = "" if row.keeps_up else " hollow"
        text = f"{row.server} at {row.level}, {row.offered_per_s:,.1f} requests/s: {figure}"
        circle = f'<circle class="dot {kind}{hollow}" cx="{left:.1f}" cy="{top:.1f}" r="4"/>'
        parts.append(f"<g><title>{escape(text)}</title>{circle}</g>")
    return parts
