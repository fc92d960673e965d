"""The parts that plots share, as inline SVG: axes, ticks, labels. Colours are CSS classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960

Scale = Callable[[float], float]  # a value to a coordinate


@dataclass(frozen=True)
class Frame:
    """The area of a plot between its margins."""

    height: float
    left: float = 70
    right: float = 60
    top: float = 30
    bottom: float = 50

    @property
    def across(self) -> tuple[float, float]:
        """Coordinates where the horizontal axis starts and ends."""
        return self.left, WIDTH - self.right

    @property
    def upwards(self) -> tuple[float, float]:
        """Coordinates where the vertical axis starts and ends."""
        return self.height - self.bottom, self.top

    def axes(
        self,
        x: Scale,
        xs: Sequence[float],
        y: Scale,
        ys: Sequence[float],
        below: str,
        above: str,
        y_label: Callable[[float], str] = "{:,g}".format,
    ) -> list[str]:
        """Draw grid lines at the ticks `xs` and `ys`, and what the axes mean."""
        parts = []
        for tick in xs:
            parts.append(f'<path class="grid" d="M{x(tick):.1f} {self.top}V{self.height - self.bottom}"/>')
            parts.append(axis_text(x(tick), self.height - self.bottom + 18, f"{tick:,g}", "middle"))
        for tick in ys:
            parts.append(f'<path class="grid" d="M{self.left} {y(tick):.1f}H{WIDTH - self.right}"/>')
            parts.append(axis_text(self.left - 8, y(tick) + 4, y_label(tick), "end"))
        parts.append(axis_text(WIDTH - self.right, self.height - 8, below, "end"))
        parts.append(axis_text(self.left, self.top - 16, above, "start"))
        return parts


def linear_scale(low: float, high: float, span: tuple[float, float]) -> Scale:
    """Map `low`..`high` to the coordinates of `span`."""
    start, end = span
    return lambda value: start + (end - start) * (value - low) / (high - low)


def log_scale(low: float, high: float, span: tuple[float, float]) -> tuple[Scale, list[float]]:
    """Map `low`..`high`, widened to ticks at 1, 2, 5, ..., logarithmically; also those ticks."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    first = max(step for step in steps if step <= low)
    last = min(step for step in steps if step >= high and step > first)
    linear = linear_scale(math.log(first), math.log(last), span)
    return lambda value: linear(math.log(value)), [step for step in steps if first <= step <= last]


def nice_ticks(high: float, low: float = 0.0, count: int = 5) -> list[float]:
    """About `count` round numbers, the first at or below `low`, the last at or above `high`."""
    if high <= low:
        high = low + 1
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def axis_text(x: float, y: float, text: str, anchor: str) -> str:
    """Draw the small grey text of a tick, an axis or a line."""
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(height: float, title: str, parts: Iterable[str]) -> str:
    """Assemble a plot, `WIDTH` wide, which scrolls where it would be too small to read."""
    body = "".join(parts)
    plot = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'
    return f'<div class="scroll">{plot}</div>'
