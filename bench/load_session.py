"""A whole run of load: every server at every level, taking turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sbert_infer.bench.load_offline import Offline
from sbert_infer.bench.load_results import LONE, SATURATION, LoadResults
from sbert_infer.bench.load_server import LoadServer, LoadSettings
from sbert_infer.bench.load_target import Target
from sbert_infer.bench.stamp import machine_stamp
from sbert_infer.bench.stats import median
from sbert_infer.bench.subject import BenchError

__all__ = ["run_load"]

_BOUND = 4.0  # times the first server's p99 of a request alone
Progress = Callable[[str], object]


def run_load(
    targets: Sequence[Target],
    workload: str,
    texts: Sequence[str],
    settings: LoadSettings,
    offline: Offline | None = None,
    progress: Progress = lambda line: None,
) -> LoadResults:
    """Load each server with `texts`; check the vectors against `offline`, or against the server's own for a text alone.

    Ctrl-C ends it with what there is, if the first server's saturation was measured.
    """
    stamp = {**machine_stamp(), **_stamp(settings), "workload": workload}
    for target in targets:
        progress(f"waiting for {target.name}")
        target.wait(settings.wait_s)
    servers = [LoadServer(_with_model(target), settings) for target in targets]
    try:
        stamp |= _introduce(servers, texts, offline, progress)
        _find_saturation(servers, settings, offline, progress)
        _raise_load(servers, settings, progress)
    except KeyboardInterrupt:  # what was measured so far is worth having
        if not servers[0].turns.get(SATURATION):
            raise
        stamp["interrupted"] = "interrupted: not all rounds and levels are there"
    lone = servers[0].lone_p99_s
    return LoadResults(
        stamp=stamp,
        servers=[{"name": one.target.name, "url": one.target.url, "model": one.target.model} for one in servers],
        rows=[row for server in servers for row in server.rows()],
        p99_bound_ms=settings.p99_ms or (1e3 * _BOUND * lone if lone else None),
        offline_texts_per_s=median(offline.texts_per_s) if offline and offline.texts_per_s else None,
    )


def _introduce(
    servers: Sequence[LoadServer], texts: Sequence[str], offline: Offline | None, progress: Progress
) -> dict[str, Any]:
    """Every text alone on every server; those that one of them refuses are left out for all."""
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


def _find_saturation(
    servers: Sequence[LoadServer], settings: LoadSettings, offline: Offline | None, progress: Progress
) -> None:
    for number in range(settings.rounds):
        for server in _rotated(servers, number):
            for level in (LONE, SATURATION):
                progress(f"round {number + 1} of {settings.rounds}, {level}, {server.target.name}")
                _calm_down(servers)
                server.closed_turn(level, number)
        if offline is not None:
            progress(f"round {number + 1} of {settings.rounds}, {offline.source}")
            offline.turn()


def _raise_load(servers: Sequence[LoadServer], settings: LoadSettings, progress: Progress) -> None:
    for number in range(settings.rounds):
        for level in settings.levels:
            for server in _rotated(servers, number):
                progress(f"round {number + 1} of {settings.rounds}, load {level.label}, {server.target.name}")
                _calm_down(servers)
                server.open_turn(level, number)


def _calm_down(servers: Sequence[LoadServer]) -> None:
    """One that is still busy with what its clients gave up long ago would take the machine from the others."""
    for server in servers:
        server.wait_until_calm()


def _rotated(servers: Sequence[LoadServer], number: int) -> list[LoadServer]:
    first = number % len(servers)
    return [*servers[first:], *servers[:first]]


def _with_model(target: Target) -> Target:
    return target if target.model else replace(target, model=target.first_model())


def _stamp(settings: LoadSettings) -> dict[str, Any]:
    kept = asdict(settings)
    kept["levels"] = [level.label for level in settings.levels]
    return kept
