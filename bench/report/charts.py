"""The plots of throughput, latency and quality, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from sbert_infer.bench.contest.lineup import EAGER, TUNED
from sbert_infer.bench.report.results import Row
from sbert_infer.bench.report.svg_parts import WIDTH, Frame, Scale, axis_text, linear_scale, log_scale, nice_ticks, svg
from sbert_infer.bench.stats import PERCENTILES

_LABELS = 270  # left of the axis, for names
_RIGHT = 150  # right of it, for values
_ACROSS = (_LABELS, WIDTH - _RIGHT)
_ROW = 30
_TOP, _BOTTOM = 10, 44
_QUALITY = Frame(height=340, right=40)


def throughput_chart(rows: Sequence[Row], noun: str = "texts") -> str:
    """Draw bars of texts/s with their spread over the rounds; wrong contestants are hatched."""
    shown = [row for row in rows if row.texts_per_s is not None]
    ticks = nice_ticks(max((row.texts_per_s_high or 0 for row in shown), default=1))
    x = linear_scale(0, ticks[-1], _ACROSS)
    parts = _grid(x, ticks, f"{noun} per second", len(shown))
    for place, row in enumerate(shown):
        y = _TOP + place * _ROW
        value, low, high = (x(getattr(row, f"texts_per_s{end}")) for end in ("", "_low", "_high"))
        middle = y + _ROW / 2
        verdict = f"{row.speed_up:.2f}x" if row.speed_up is not None else "WRONG"
        parts += [
            f"<g><title>{escape(_tooltip(row, noun))}</title>",
            _name(row, middle),
            f'<rect class="{_kind(row)}" x="{_LABELS}" y="{y + 5}" width="{value - _LABELS:.1f}" '
            f'height="{_ROW - 10}" rx="3"/>',
            f'<path class="spread" d="M{low:.1f} {middle}H{high:.1f}'
            f'M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"/>',
            f'<text class="value" x="{high + 8:.1f}" y="{middle + 4}">{row.texts_per_s:,.0f}',
            f' <tspan class="{"dim" if row.status == "ok" else "bad"}">{verdict}</tspan></text></g>',
        ]
    return svg(_TOP + len(shown) * _ROW + _BOTTOM, f"Throughput in {noun} per second", parts)


def latency_chart(rows: Sequence[Row], noun: str = "texts") -> str:
    """Draw a line from p50 to p99 for each contestant, in milliseconds on a logarithmic axis."""
    shown = sorted((row for row in rows if row.latency_ms), key=lambda row: row.latency_ms["p50"])
    values = [row.latency_ms[f"p{rank}"] for row in shown for rank in PERCENTILES]
    x, ticks = log_scale(min(values), max(values), _ACROSS)
    parts = _grid(x, ticks, f"milliseconds for one {noun[:-1]}, logarithmic: p50, p95, p99", len(shown))
    for place, row in enumerate(shown):
        middle = _TOP + (place + 0.5) * _ROW
        xs = [x(row.latency_ms[f"p{rank}"]) for rank in PERCENTILES]
        texts = ", ".join(f"p{rank} {row.latency_ms[f'p{rank}']:.2f} ms" for rank in PERCENTILES)
        ends = f"{row.latency_ms['p50']:.1f} to {row.latency_ms['p99']:.1f} ms"
        dots = zip(xs, (6, 4.5, 3), strict=True)
        parts += [
            f"<g><title>{escape(f'{row.contestant}: {texts}')}</title>",
            _name(row, middle),
            f'<path class="{_kind(row)} line" d="M{xs[0]:.1f} {middle:.1f}H{xs[-1]:.1f}"/>',
            *(f'<circle class="{_kind(row)}" cx="{at:.1f}" cy="{middle:.1f}" r="{size}"/>' for at, size in dots),
            f'<text class="value" x="{xs[-1] + 10:.1f}" y="{middle + 4:.1f}">{ends}</text></g>',
        ]
    return svg(_TOP + len(shown) * _ROW + _BOTTOM, "Latency of one text at a time", parts)


def quality_chart(rows: Sequence[Row], noun: str = "texts") -> str:
    """Plot speed against quality: the first measure that all have, else the digits that agree.

    Nothing is drawn where all agree to the same digit, as when only exact contestants ran.
    """
    ran = [row for row in rows if row.status != "failed"]
    shared = [name for name in (ran[0].quality if ran else {}) if all(name in row.quality for row in ran)]
    measure = shared[0] if shared else ""
    points = [(row, row.texts_per_s, _quality(row, measure)) for row in _best(rows) if row.texts_per_s is not None]
    kept = [(row, speed, quality) for row, speed, quality in points if quality is not None]
    qualities = [quality for _, _, quality in kept]
    if not kept or (not measure and max(qualities) - min(qualities) < 1):
        return ""
    xs = nice_ticks(1.12 * max(speed for _, speed, _ in kept))
    x = linear_scale(0, xs[-1], _QUALITY.across)
    y_label: Callable[[float], str] = _tenth
    if measure:
        ys = nice_ticks(max(qualities) + 0.002, min(qualities) - 0.002)
        y, title, y_label = linear_scale(ys[0], ys[-1], _QUALITY.upwards), measure, "{:.3f}".format
    else:
        low, high = math.floor(min(qualities)), max(qualities) + 0.6
        ys = list(range(math.ceil(low), math.floor(high) + 1))
        agreement = "cosine of the worst text" if kept[0][0].correlation is None else "correlation of the scores"
        y, title = linear_scale(low, high, _QUALITY.upwards), f"1 - {agreement}"
    above = f"{title} (up is better), each library at its best"
    parts = _QUALITY.axes(x, xs, y, ys, f"{noun} per second", above, y_label)
    dots = [(row, x(speed), y(quality)) for row, speed, quality in kept]
    taken = [(left - 7, left + 7, top + 4) for _, left, top in dots]
    for row, left, top in sorted(dots, key=lambda dot: (not dot[0].ours, -dot[1])):
        parts += _point(row, left, top, taken, noun)
    return svg(_QUALITY.height, f"Speed against quality: {title}", parts)


def _tenth(digits: float) -> str:
    return f"1e-{digits:g}" if digits else "1"


def _best(rows: Sequence[Row]) -> list[Row]:
    """Keep the faster of a library's own and tuned configurations."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.texts_per_s or 0):
        best[row.contestant.removesuffix(TUNED)] = row
    return list(best.values())


def _quality(row: Row, measure: str) -> float | None:
    if measure:
        return row.quality.get(measure)
    agreement = row.min_cosine if row.correlation is None else row.correlation
    if agreement is None:
        return None
    return min(8.0, -math.log10(max(1e-8, 1 - agreement)))  # beyond eight digits is rounding


def _point(row: Row, x: float, y: float, taken: list[tuple[float, float, float]], noun: str) -> list[str]:
    """Draw a dot and its name, moved down past what is `taken` (left, right, baseline)."""
    width = 6.6 * len(row.contestant)
    start = x + 9 if x + 9 + width < WIDTH else x - 9 - width
    at = y + 4
    while any(abs(at - other) < 13 and start < end and begin < start + width for begin, end, other in taken):
        at += 3
    taken.append((start, start + width, at))
    lead = f'<path class="lead" d="M{x:.1f} {y:.1f}L{start - 2:.1f} {at - 4:.1f}"/>' if at - y > 10 else ""
    return [
        f"<g><title>{escape(_tooltip(row, noun))}</title>{lead}",
        f'<circle class="{_kind(row)}" cx="{x:.1f}" cy="{y:.1f}" r="{7 if row.ours else 5}"/>',
        f'<text class="point{" strong" if row.ours else ""}" x="{start:.1f}" y="{at:.1f}">',
        f"{escape(row.contestant)}</text></g>",
    ]


def _kind(row: Row) -> str:
    if row.status == "wrong":
        return "wrong"
    return "ours" if row.ours else "eager" if row.contestant == EAGER else "rival"


def _tooltip(row: Row, noun: str) -> str:
    cosine = "" if row.min_cosine is None else f", min cosine {row.min_cosine:.6f}"
    reason = f" - {row.reason}" if row.reason else ""
    return f"{row.contestant}: {row.texts_per_s:,.1f} {noun}/s{cosine}{reason}"


def _name(row: Row, middle: float) -> str:
    strong = " strong" if row.ours else ""
    return f'<text class="name{strong}" x="{_LABELS - 10}" y="{middle + 4:.1f}">{escape(row.contestant)}</text>'


def _grid(x: Scale, ticks: Sequence[float], title: str, rows: int) -> list[str]:
    """Draw vertical lines at the ticks, and below them what they mean."""
    bottom = _TOP + rows * _ROW
    parts = []
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {_TOP}V{bottom}"/>')
        parts.append(axis_text(x(tick), bottom + 16, f"{tick:,g}", "middle"))
    return [*parts, axis_text(_LABELS, bottom + 36, title, "start")]
