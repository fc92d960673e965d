"""What a run of load found, as it is kept in a JSON file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sbert_infer.bench.stats import median, percentiles

__all__ = ["LONE", "SATURATION", "LoadResults", "LoadRow", "Turn", "load_json", "summarise"]

LONE, SATURATION = "lone", "saturation"  # the two levels at which clients wait for their answer
FORMAT_VERSION = 2  # 2: figures of the rounds


@dataclass
class Turn:
    """One server's turn at one level of load. Latencies count from when a request was due."""

    seconds: float  # until the last answer
    sent: int  # requests
    offered_per_s: float | None  # None where clients wait for their answer
    latencies_ms: list[float] = field(default_factory=list)  # of answers, right or wrong
    refusals_ms: list[float] = field(default_factory=list)  # of 429
    late_ms: list[float] = field(default_factory=list)  # by which the generator itself sent too late
    errors: Counter[str] = field(default_factory=Counter)
    right: int = 0  # requests with nothing but right vectors
    right_beside: int = 0  # and of those that watched the recovery: they took their share until the last answer
    right_texts: int = 0
    wrong_texts: int = 0
    generator_cpu_s: float = 0.0
    memory_mb: float | None = None
    recovery_s: float | None = None
    watched_s: float | None = None  # for how long the recovery was watched


@dataclass
class LoadRow:
    """A server at a level of load, over all rounds. Rates are requests per second unless they say otherwise."""

    server: str
    level: str
    offered_per_s: float | None
    answered_per_s: float
    refused_per_s: float
    goodput_per_s: float  # answers with nothing but right vectors
    goodput_rounds: list[float]
    texts_per_s: float  # right ones
    texts_rounds: list[float]
    sent: int
    answered: int
    right: int
    refused: int
    errors: dict[str, int]
    wrong_texts: int
    latency_ms: dict[str, float]  # p50, p95, p99, max; empty if nothing was answered
    p99_rounds: list[float | None]
    refusal_ms: dict[str, float]
    late_p99_ms: float
    generator_cpu: float  # share of one core
    memory_mb: float | None = None
    recovery_s: float | None = None  # of the slowest round; None with `watched_s` set: not within that time
    watched_s: float | None = None

    @property
    def keeps_up(self) -> bool:
        """Whether the server answered all but 1 % of what it was sent; if not, its latencies are those of the lucky."""
        return self.right >= 0.99 * self.sent


@dataclass
class LoadResults:
    """A whole run. The first server is the one that the others are compared with."""

    stamp: dict[str, Any]
    servers: list[dict[str, Any]]  # name, url, model
    rows: list[LoadRow]
    p99_bound_ms: float | None = None
    offline_rounds: list[float] = field(default_factory=list)  # texts per second without a server
    format_version: int = FORMAT_VERSION

    @property
    def names(self) -> list[str]:
        """The servers' names."""
        return [server["name"] for server in self.servers]

    @property
    def wrong_texts(self) -> int:
        """Vectors that were not those of their texts."""
        return sum(row.wrong_texts for row in self.rows)

    def of(self, server: str) -> list[LoadRow]:
        """A server's rows."""
        return [row for row in self.rows if row.server == server]

    def row(self, server: str, level: str) -> LoadRow | None:
        """A server's row at a level, if there is one."""
        return next((row for row in self.of(server) if row.level == level), None)


def summarise(server: str, level: str, turns: Sequence[Turn]) -> LoadRow:
    """One row of a server's turns at a level."""
    seconds = sum(turn.seconds for turn in turns)
    latencies = [value for turn in turns for value in turn.latencies_ms]
    refusals = [value for turn in turns for value in turn.refusals_ms]
    offered = [turn.offered_per_s for turn in turns if turn.offered_per_s is not None]
    watched = [turn for turn in turns if turn.watched_s is not None]
    return LoadRow(
        server=server,
        level=level,
        offered_per_s=float(np.mean(offered)) if offered else None,
        answered_per_s=len(latencies) / seconds,
        refused_per_s=len(refusals) / seconds,
        goodput_per_s=sum(turn.right + turn.right_beside for turn in turns) / seconds,
        goodput_rounds=[(turn.right + turn.right_beside) / turn.seconds for turn in turns],
        texts_per_s=sum(turn.right_texts for turn in turns) / seconds,
        texts_rounds=[turn.right_texts / turn.seconds for turn in turns],
        sent=sum(turn.sent for turn in turns),
        answered=len(latencies),
        right=sum(turn.right for turn in turns),
        refused=len(refusals),
        errors=dict(sum((turn.errors for turn in turns), Counter())),
        wrong_texts=sum(turn.wrong_texts for turn in turns),
        latency_ms=_spread(latencies),
        p99_rounds=[_spread(turn.latencies_ms).get("p99") for turn in turns],
        refusal_ms=_spread(refusals),
        late_p99_ms=_spread([value for turn in turns for value in turn.late_ms]).get("p99", 0.0),
        generator_cpu=sum(turn.generator_cpu_s for turn in turns) / seconds,
        memory_mb=max((turn.memory_mb for turn in turns if turn.memory_mb is not None), default=None),
        recovery_s=_slowest([turn.recovery_s for turn in watched]),
        watched_s=median([turn.watched_s or 0 for turn in watched]) if watched else None,
    )


def load_json(results: LoadResults) -> str:
    """The content of the JSON file."""
    return json.dumps(asdict(results), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _slowest(recoveries: Sequence[float | None]) -> float | None:
    known = [value for value in recoveries if value is not None]
    return max(known) if known and len(known) == len(recoveries) else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {**percentiles(values), "max": max(values)} if values else {}
