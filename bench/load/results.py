"""The results of a load test, as kept in a JSON file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from sbert_infer.bench.stats import percentiles

LONE, SATURATION = "lone", "saturation"  # the two levels at which clients wait for responses
FORMAT_VERSION = 2  # 2: figures of the rounds


@dataclass
class Turn:
    """One server's turn at one level of load. Latencies count from when a request was due."""

    seconds: float  # until the last response
    sent: int  # requests
    offered_per_s: float | None  # None where clients wait for responses
    latencies_ms: list[float] = field(default_factory=list)  # of responses, correct or not
    refusals_ms: list[float] = field(default_factory=list)  # of responses with status 429
    late_ms: list[float] = field(default_factory=list)  # delay added by the load generator itself
    errors: Counter[str] = field(default_factory=Counter)
    right: int = 0  # requests with only correct vectors
    right_beside: int = 0  # the same for probes of the recovery that overlapped with the turn
    right_texts: int = 0
    wrong_texts: int = 0
    generator_cpu_s: float = 0.0
    memory_mb: float | None = None
    recovery_s: float | None = None
    watched_s: float | None = None  # for how long the recovery was watched


@dataclass
class LoadRow:
    """A server at a level of load, over all rounds. Rates are in requests per second."""

    server: str
    level: str
    offered_per_s: float | None
    answered_per_s: float
    refused_per_s: float
    goodput_per_s: float  # responses with only correct vectors
    goodput_rounds: list[float]
    texts_per_s: float  # texts with correct vectors
    texts_rounds: list[float]
    sent: int
    answered: int
    right: int
    refused: int
    errors: dict[str, int]
    wrong_texts: int
    latency_ms: dict[str, float]  # p50, p95, p99, max; empty without a response
    p99_rounds: list[float | None]
    refusal_ms: dict[str, float]
    late_p99_ms: float
    generator_cpu: float  # share of one core
    memory_mb: float | None = None
    recovery_s: float | None = None  # slowest round; None with `watched_s` set: longer than that
    watched_s: float | None = None

    @property
    def keeps_up(self) -> bool:
        """Whether it handled all but 1 % of the requests. If not, its latencies mean little."""
        return self.right >= 0.99 * self.sent


@dataclass
class LoadResults:
    """A whole run. The first server is compared with the others."""

    stamp: dict[str, Any]
    servers: list[dict[str, Any]]  # name, url, model
    rows: list[LoadRow]
    p99_bound_ms: float | None = None
    offline_rounds: list[float] = field(default_factory=list)  # texts per second without a server
    format_version: int = FORMAT_VERSION

    @property
    def names(self) -> list[str]:
        """Names of the servers."""
        return [server["name"] for server in self.servers]

    @property
    def wrong_texts(self) -> int:
        """Number of texts that got a wrong vector."""
        return sum(row.wrong_texts for row in self.rows)

    def of(self, server: str) -> list[LoadRow]:
        """List a server's rows."""
        return [row for row in self.rows if row.server == server]

    def row(self, server: str, level: str) -> LoadRow | None:
        """Find a server's row at a level, if there is one."""
        return next((row for row in self.of(server) if row.level == level), None)


def summarise(server: str, level: str, turns: Sequence[Turn]) -> LoadRow:
    """Summarise a server's turns at one level."""
    seconds = sum(turn.seconds for turn in turns)
    latencies = [value for turn in turns for value in turn.latencies_ms]
    refusals = [value for turn in turns for value in turn.refusals_ms]
    offered = [turn.offered_per_s for turn in turns if turn.offered_per_s is not None]
    watched = [turn for turn in turns if turn.watched_s is not None]
    slowest = max((math.inf if turn.recovery_s is None else turn.recovery_s for turn in watched), default=math.inf)
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
        recovery_s=slowest if math.isfinite(slowest) else None,
        watched_s=median([turn.watched_s or 0 for turn in watched]) if watched else None,
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {**percentiles(values), "max": max(values)} if values else {}
