"""One whole load test: every server at every level, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.load.offline import Offline
from sbert_infer.bench.load.results import LONE, SATURATION, LoadResults
from sbert_infer.bench.load.server import LoadServer, LoadSettings
from sbert_infer.bench.load.target import Target
from sbert_infer.bench.report.machine import machine_stamp

__all__ = ["run_load"]

_BOUND = 4.0  # times the first server's p99 of a lone request
Progress = Callable[[str], object]


def run_load(
    targets: Sequence[Target],
    workload: str,
    texts: Sequence[str],
    settings: LoadSettings,
    offline: Offline | None = None,
    progress: Progress = lambda line: None,
) -> LoadResults:
    """Load each server with `texts` and check the vectors.

    They are compared with those of `offline`, or with the server's own vector of the text alone.
    Ctrl-C returns what was measured so far, if the first server's saturation was.
    """
    stamp: dict[str, Any] = {**machine_stamp(), **asdict(settings), "workload": workload}
    stamp["levels"] = [level.label for level in settings.levels]
    for target in targets:
        progress(f"waiting for {target.name}")
        target.wait(settings.wait_s)
    named = [target if target.model else replace(target, model=target.first_model()) for target in targets]
    servers = [LoadServer(target, settings) for target in named]
    try:
        stamp |= _introduce(servers, texts, offline, progress)
        for number in range(settings.rounds):
            _run_round(servers, number, settings, offline, progress)
    except KeyboardInterrupt:  # keep what was measured so far
        if not servers[0].turns.get(SATURATION):
            raise
        stamp["interrupted"] = "interrupted: not all rounds and levels are there"
    lone = servers[0].lone_p99_s
    return LoadResults(
        stamp=stamp,
        servers=[{"name": one.target.name, "url": one.target.url, "model": one.target.model} for one in servers],
        rows=[row for server in servers for row in server.rows()],
        p99_bound_ms=settings.p99_ms or (1e3 * _BOUND * lone if lone else None),
        offline_rounds=offline.texts_per_s if offline else [],
    )


def _introduce(
    servers: Sequence[LoadServer], texts: Sequence[str], offline: Offline | None, progress: Progress
) -> dict[str, Any]:
    """Send every text alone to every server; leave out those that any server refuses."""
    own = []
    for server in servers:
        progress(f"{server.target.name}: each text alone")
        own.append(server.introduce(texts))
    kept = [row for row in range(len(texts)) if all(row in vectors for vectors in own)]
    if not kept:
        raise BenchError("each text is refused by one of the servers: use shorter ones, --workload short")
    chosen = [texts[row] for row in kept]
    expected = None
    if offline is not None:
        progress(f"encoding with {offline.source}")
        expected = offline.vectors(chosen)
    for server, vectors in zip(servers, own, strict=True):
        progress(f"{server.target.name}: warming up")
        server.prepare(chosen, np.stack([vectors[row] for row in kept]) if expected is None else expected)
    return {
        "texts": len(kept),
        "texts_left_out": len(texts) - len(kept),
        "mean_words": round(float(np.mean([len(text.split()) for text in chosen])), 1),
        "compared_with": "the server's own vector of the text alone" if offline is None else offline.source,
    }


def _run_round(
    servers: Sequence[LoadServer], number: int, settings: LoadSettings, offline: Offline | None, progress: Progress
) -> None:
    """Measure in close succession what is compared: a machine's speed changes within minutes."""
    about, first = f"round {number + 1} of {settings.rounds}", number % len(servers)

    def each(what: str, turn: Callable[[LoadServer], None]) -> None:
        for server in [*servers[first:], *servers[:first]]:
            progress(f"{about}, {what}, {server.target.name}")
            for one in servers:  # one still busy with abandoned requests would slow down the others
                one.wait_until_calm()
            turn(server)

    each(LONE, partial(LoadServer.closed_turn, level=LONE, number=number))
    if offline is not None:
        progress(f"{about}, {offline.source}")
        offline.turn()
    each(SATURATION, partial(LoadServer.closed_turn, level=SATURATION, number=number))
    for level in settings.levels:
        each(f"load {level.label}", partial(LoadServer.open_turn, level=level, number=number))
