"""What is sent and when: levels, Poisson arrivals, order of requests. Pure, seeded functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.errors import BenchError

__all__ = ["Level", "group_texts", "parse_levels", "parse_sizes", "poisson_arrivals", "request_order"]

_LEVEL = re.compile(r"(\d+(?:\.\d+)?)(%|x|)")
_SIZES = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Level:
    """A level of load: a share of the server's saturation (50%, 5x), or requests per second."""

    label: str
    value: float
    relative: bool

    def requests_per_s(self, saturation: float) -> float:
        """Rate for a server whose saturation is `saturation` requests per second."""
        return self.value * saturation if self.relative else self.value


def parse_levels(text: str) -> tuple[Level, ...]:
    """Parse levels such as `10%,70%,5x` or `100,200`."""
    levels = []
    for label in (part.strip() for part in text.split(",")):
        match = _LEVEL.fullmatch(label)
        value = float(match[1]) / (100 if match[2] == "%" else 1) if match else 0
        if match is None or not value:
            raise BenchError(f"--rates: {label!r} is not a rate above 0 such as 70%, 5x or 120 (requests per second)")
        levels.append(Level(label, value, relative=bool(match[2])))
    if len(set(levels)) < len(levels):
        raise BenchError(f"--rates {text} names a rate twice")
    return tuple(levels)


def parse_sizes(text: str) -> tuple[int, int]:
    """Parse the number of texts per request: `1`, or a range such as `1-32`."""
    match = _SIZES.fullmatch(text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise BenchError(f"--inputs-per-request {text!r} is neither a number above 0 nor a range such as 1-32")
    return low, high


def group_texts(count: int, sizes: tuple[int, int], seed: int) -> list[tuple[int, ...]]:
    """Distribute texts 0..count-1 over requests of random size, drawn uniformly from `sizes`.

    Each text is in one request; the last request takes what is left.
    """
    rng = np.random.default_rng(seed)
    rows = rng.permutation(count).tolist()
    groups = []
    while rows:
        size = int(rng.integers(sizes[0], sizes[1], endpoint=True))
        groups.append(tuple(rows[:size]))
        rows = rows[size:]
    return groups


def poisson_arrivals(rate: float, duration_s: float, seed: int | Sequence[int]) -> npt.NDArray[np.float64]:
    """Draw random arrival times in [0, `duration_s`), with `rate` per second on average."""
    rng = np.random.default_rng(seed)
    times = np.empty(0)
    while not times.size or times[-1] < duration_s:
        gaps = rng.exponential(1 / rate, size=int(rate * duration_s) + 16)
        times = np.concatenate([times, (times[-1] if times.size else 0) + np.cumsum(gaps)])
    return times[times < duration_s]


def request_order(requests: int, count: int, seed: int | Sequence[int]) -> npt.NDArray[np.int64]:
    """Order `count` requests out of `requests`: all in random order, then all in another, ..."""
    rng = np.random.default_rng(seed)
    passes = [rng.permutation(requests) for _ in range(-(-count // requests))]
    return np.concatenate(passes)[:count] if passes else np.empty(0, np.int64)
