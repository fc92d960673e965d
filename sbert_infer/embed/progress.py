"""A job's progress: share of the input, texts and tokens per second, time left.

A bar on a terminal; elsewhere, in a log say, a line now and then.
"""

from __future__ import annotations

import math
import sys
import time

from tqdm import tqdm

_STEPS = 10_000  # steps of the bar
LINE_S = 30.0  # between two lines where there is no terminal
_WITH_TOTAL = "{percentage:5.1f}% |{bar}| {desc} [{elapsed}<{remaining}]"
_WITHOUT = "{desc} [{elapsed}]"


class Progress:
    """Counts texts and tokens, and shows them."""

    def __init__(self, fraction: float, *, quiet: bool = False) -> None:
        self.texts = self.tokens = 0
        self._started = time.monotonic()
        self._parts: list[tuple[int, float]] = []
        self._done_in_part = 0
        self._fraction = fraction
        known = not math.isnan(fraction)
        initial = round(fraction * _STEPS) if known else 0
        style = _WITH_TOTAL if known else _WITHOUT
        # disable=None shows it on a terminal only
        self._bar = tqdm(total=_STEPS, initial=initial, bar_format=style, disable=True if quiet else None, leave=False)
        self._lines, self._line_at = self._bar.disable and not quiet, self._started

    def part(self, texts: int, fraction: float) -> None:
        """Announce the next part, which ends at `fraction` of the input, NaN if unknown."""
        self._parts.append((texts, fraction))

    def add(self, texts: int) -> None:
        """Count `texts` more as done."""
        self.texts += texts
        self._done_in_part += texts
        while self._parts and self._done_in_part >= self._parts[0][0]:
            size, self._fraction = self._parts.pop(0)
            self._done_in_part -= size
        self._show()

    def skip(self, texts: int) -> None:
        """Count `texts` as done that did not run."""
        self.texts -= texts
        self.add(texts)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def _show(self) -> None:
        speed = f"{self.texts / self.seconds:,.0f} texts/s, {self.tokens / self.seconds:,.0f} tokens/s"
        self._bar.set_description_str(f"{self.texts:,} texts, {speed}", refresh=False)
        here = self._fraction
        if self._parts:
            size, end = self._parts[0]
            here += (end - here) * self._done_in_part / max(1, size)
        self._bar.update(0 if math.isnan(here) else max(0, round(here * _STEPS) - self._bar.n))
        if self._lines and time.monotonic() - self._line_at >= LINE_S:
            self._line_at = time.monotonic()
            share = "" if math.isnan(here) else f"{here:6.1%}, "
            print(f"{share}{self.texts:,} texts, {speed}, {self.seconds:,.0f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
