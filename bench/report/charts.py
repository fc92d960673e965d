"""The report's plots, as inline SVG. Colours are CSS classes: `page.py` gives them a light and a dark form."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from sbert_infer.bench.contest.lineup import EAGER, TUNED
from sbert_infer.bench.report.results import Row
from sbert_infer.bench.stats import PERCENTILES

__all__ = ["WIDTH", "axis_text", "latency_chart", "nice_ticks", "quality_chart", "svg", "throughput_chart"]

WIDTH = 960
_LABELS = 270  # left of the axis, for names
_RIGHT = 150  # right of it, for values
_ROW = 30
_TOP, _BOTTOM = 10, 44


def throughput_chart(rows: Sequence[Row], noun: str = "texts") -> str:
    """Bars of texts/s with the spread over the rounds; a wrong contestant's is hatched."""
    shown = [row for row in rows if row.texts_per_s is not None]
    top = max((row.texts_per_s_high or 0 for row in shown), default=1)
    ticks = nice_ticks(top)
    scale = (WIDTH - _LABELS - _RIGHT) / max(top, ticks[-1])
    parts = [*_grid(ticks, scale, len(shown), f"{noun} per second")]
    for place, row in enumerate(shown):
        y = _TOP + place * _ROW
        value, low, high = (getattr(row, f"texts_per_s{end}") * scale for end in ("", "_low", "_high"))
        middle = y + _ROW / 2
        verdict = f"{row.speed_up:.2f}x" if row.speed_up is not None else "WRONG"
        parts += [
            f"<g><title>{escape(_tooltip(row, noun))}</title>",
            _name(row, middle),
            f'<rect class="{_kind(row)}" x="{_LABELS}" y="{y + 5}" width="{value:.1f}" height="{_ROW - 10}" rx="3"/>',
            f'<path class="spread" d="M{_LABELS + low:.1f} {middle}H{_LABELS + high:.1f}'
            f'M{_LABELS + low:.1f} {middle - 4}v8M{_LABELS + high:.1f} {middle - 4}v8"/>',
            f'<text class="value" x="{_LABELS + high + 8:.1f}" y="{middle + 4}">{row.texts_per_s:,.0f}',
            f' <tspan class="{"dim" if row.status == "ok" else "bad"}">{verdict}</tspan></text></g>',
        ]
    return svg(_TOP + len(shown) * _ROW + _BOTTOM, f"Throughput in {noun} per second", parts)


def latency_chart(rows: Sequence[Row], noun: str = "texts") -> str:
    """A line from p50 to p99 for each contestant, in milliseconds on a logarithmic axis."""
    shown = sorted((row for row in rows if row.latency_ms), key=lambda row: row.latency_ms["p50"])
    values = [row.latency_ms[f"p{rank}"] for row in shown for rank in PERCENTILES]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    scale = (WIDTH - _LABELS - _RIGHT) / (high - low)
    ticks = [step * 10**decade for decade in range(low, high) for step in (1, 2, 5)] + [10**high]
    parts = [
        *(_tick(_LABELS + (math.log10(tick) - low) * scale, f"{tick:g}", len(shown)) for tick in ticks),
        _axis_title(f"milliseconds for one {noun[:-1]}, logarithmic: p50, p95, p99", len(shown)),
    ]
    for place, row in enumerate(shown):
        middle = _TOP + (place + 0.5) * _ROW
        xs = [_LABELS + (math.log10(row.latency_ms[f"p{rank}"]) - low) * scale for rank in PERCENTILES]
        texts = ", ".join(f"p{rank} {row.latency_ms[f'p{rank}']:.2f} ms" for rank in PERCENTILES)
        dots = zip(xs, (6, 4.5, 3), strict=True)
        parts += [
            f"<g><title>{escape(f'{row.contestant}: {texts}')}</title>",
            _name(row, middle),
            f'<path class="{_kind(row)} line" d="M{xs[0]:.1f} {middle:.1f}H{xs[-1]:.1f}"/>',
            *(f'<circle class="{_kind(row)}" cx="{x:.1f}" cy="{middle:.1f}" r="{size}"/>' for x, size in dots),
            f'<text class="value" x="{xs[-1] + 10:.1f}" y="{middle + 4:.1f}">{_ends(row)}</text></g>',
        ]
    return svg(_TOP + len(shown) * _ROW + _BOTTOM, "Latency of one text at a time", parts)


def quality_chart(rows: Sequence[Row], noun: str = "texts") -> str:
    """Speed against quality: by the first measure that all have, else how many digits of the vectors agree."""
    ran = [row for row in rows if row.status != "failed"]
    shared = [name for name in (ran[0].quality if ran else {}) if all(name in row.quality for row in ran)]
    measured = shared[0] if shared else ""
    points = [(row, row.texts_per_s, _quality(row, measured)) for row in _best(rows) if row.texts_per_s is not None]
    kept = [(row, x, y) for row, x, y in points if y is not None]
    if not kept:
        return ""
    height, left, right, bottom = 420, 70, 40, 50
    xs = nice_ticks(1.12 * max(x for _, x, _ in kept))
    low, high = _range([y for _, _, y in kept], bool(measured))
    x_scale, y_scale = (WIDTH - left - right) / xs[-1], (height - bottom - 20) / (high - low)
    agreement = "cosine of the worst text" if kept[0][0].correlation is None else "correlation of the scores"
    title = measured or f"1 - {agreement}"
    parts = []
    for tick in xs:
        x = left + tick * x_scale
        parts.append(f'<path class="grid" d="M{x:.1f} 20V{height - bottom}"/>' + _label(x, height - bottom + 18, tick))
    for tick in nice_ticks(high, low) if measured else range(math.ceil(low), math.floor(high) + 1):
        y = height - bottom - (tick - low) * y_scale
        text = f"{tick:.3f}" if measured else f"1e-{tick}" if tick else "1"
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - right}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    parts.append(axis_text(WIDTH - right, height - 8, f"{noun} per second", "end"))
    parts.append(axis_text(left, 12, f"{title} (up is better), each library at its best", "start"))
    dots = [(row, left + x * x_scale, height - bottom - (y - low) * y_scale) for row, x, y in kept]
    taken = [(x - 7, x + 7, y + 4) for _, x, y in dots]
    for row, x, y in sorted(dots, key=lambda dot: (not dot[0].ours, -dot[1])):
        parts += _point(row, x, y, taken, noun)
    return svg(height, f"Speed against quality: {title}", parts)


def nice_ticks(high: float, low: float = 0.0, count: int = 5) -> list[float]:
    """About `count` round numbers; the first at or below `low`, the last at or above `high`."""
    if high <= low:
        high = low + 1
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def _best(rows: Sequence[Row]) -> list[Row]:
    """Of a library's own and tuned configuration the faster one."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.texts_per_s or 0):
        best[row.contestant.removesuffix(TUNED)] = row
    return list(best.values())


def _ends(row: Row) -> str:
    return f"{row.latency_ms['p50']:.1f} to {row.latency_ms['p99']:.1f} ms"


def _quality(row: Row, measured: str) -> float | None:
    if measured:
        return row.quality.get(measured)
    agreement = row.min_cosine if row.correlation is None else row.correlation
    if agreement is None:
        return None
    return min(8.0, -math.log10(max(1e-8, 1 - agreement)))  # beyond eight digits is rounding


def _range(values: Sequence[float], measured: bool) -> tuple[float, float]:
    if not measured:
        return min(0.0, math.floor(min(values))), max(values) + 0.6
    ticks = nice_ticks(max(values) + 0.002, min(values) - 0.002)
    return ticks[0], ticks[-1]


def _point(row: Row, x: float, y: float, taken: list[tuple[float, float, float]], noun: str) -> list[str]:
    """A dot and its name, moved down until it covers nothing; what is taken has a left, a right and a baseline."""
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


def _grid(ticks: Iterable[float], scale: float, rows: int, title: str) -> list[str]:
    return [*(_tick(_LABELS + tick * scale, f"{tick:,g}", rows) for tick in ticks), _axis_title(title, rows)]


def _tick(x: float, text: str, rows: int) -> str:
    bottom = _TOP + rows * _ROW
    line = f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>'
    return f'{line}<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'


def _label(x: float, y: float, tick: float) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{tick:,g}</text>'


def _axis_title(title: str, rows: int) -> str:
    return axis_text(_LABELS, _TOP + rows * _ROW + 36, title, "start")


def axis_text(x: float, y: float, text: str, anchor: str) -> str:
    """Small grey text: what an axis or a line means."""
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(height: float, title: str, parts: Iterable[str]) -> str:
    """A plot, `WIDTH` wide."""
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'
