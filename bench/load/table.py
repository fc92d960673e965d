"""The results of a load test as tables: aligned plain text, or markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from sbert_infer.bench.load.curve import compare_servers
from sbert_infer.bench.load.goals import goals
from sbert_infer.bench.load.results import LoadResults, LoadRow
from sbert_infer.bench.report.table import number, render_cells

Cells = tuple[list[str], list[list[str]]]


def _errors(row: LoadRow) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(row.errors.items())) or "0"


# Heading -> how to render a row's cell. Rates are requests per second.
COLUMNS: dict[str, Callable[[LoadRow], str]] = {
    "level": lambda row: row.level,
    "offered/s": lambda row: number(row.offered_per_s, "{:,.1f}"),
    "answered/s": lambda row: f"{row.answered_per_s:,.1f}",
    "refused/s": lambda row: f"{row.refused_per_s:,.1f}",
    "errors": _errors,
    "wrong": lambda row: f"{row.wrong_texts:,}",
    "goodput/s": lambda row: f"{row.goodput_per_s:,.1f}",
    "texts/s": lambda row: f"{row.texts_per_s:,.1f}",
    "p50 ms": lambda row: number(row.latency_ms.get("p50"), "{:,.1f}"),
    "p95 ms": lambda row: number(row.latency_ms.get("p95"), "{:,.1f}"),
    "p99 ms": lambda row: number(row.latency_ms.get("p99"), "{:,.1f}"),
    "max ms": lambda row: number(row.latency_ms.get("max"), "{:,.1f}"),
    "late ms": lambda row: f"{row.late_p99_ms:,.1f}",
    "client CPU": lambda row: f"{row.generator_cpu:.0%}",
    "MB": lambda row: number(row.memory_mb, "{:,.0f}"),
}


def render_load(results: LoadResults, *, markdown: bool = False) -> str:
    """Render all results, server by server."""
    parts = []
    for server in results.servers:
        name = f"**{server['name']}**" if markdown else server["name"]
        parts.append(f"{name}: {server['url']}, model {server['model']}")
        parts.append(render_cells(*load_cells(results.of(server["name"])), markdown=markdown))
        parts.append(render_cells(*goal_cells(results, server["name"]), markdown=markdown))
    lines = [*comparison_lines(results), *describe_load(results.stamp)]
    parts.append("\n".join(f"{'- ' if markdown else ''}{line}" for line in lines))
    return "\n\n".join(parts)


def load_cells(rows: Sequence[LoadRow]) -> Cells:
    """Render a server's levels, without the memory column if it was not measured."""
    shown = {name: cell for name, cell in COLUMNS.items() if name != "MB" or any(row.memory_mb for row in rows)}
    return list(shown), [[cell(row) for cell in shown.values()] for row in rows]


def goal_cells(results: LoadResults, server: str) -> Cells:
    """Render what a server reaches and what it should."""
    verdicts = {None: "", True: "ok", False: "MISSED"}
    lines = [[goal.what, goal.value, goal.wanted, verdicts[goal.met]] for goal in goals(results, server)]
    return ["what", "measured", "wanted", "verdict"], lines


def describe_load(stamp: dict[str, Any]) -> list[str]:
    """Say where, when and how it was measured."""
    low, high = stamp["sizes"]
    inputs = f"{low}" if low == high else f"{low} to {high}"
    lines = [
        f"{stamp.get('texts', 0):,} texts ({stamp['workload']}, mean {stamp.get('mean_words', 0)} words), {inputs} per "
        f"request, {stamp['encoding_format']}; {stamp['rounds']} rounds, {stamp['duration_s']:g} s per turn, "
        f"{stamp['clients']} clients at saturation, timeout {stamp['timeout_s']:g} s, seed {stamp['seed']}",
        f"vectors compared with {stamp.get('compared_with', 'nothing')}: cosine {stamp['min_cosine']} or above",
        f"{stamp['cpu']}, {stamp['cores']} usable cores, {stamp['memory_gb']} GB, {stamp['os']}, load average "
        f"{stamp['load_average']} at the start, {stamp['date']}, sbert-infer {stamp['sbert_infer']}",
        "latency from when a request was due; late ms: p99 of what the client itself added; client CPU: of one core",
    ]
    if stamp.get("texts_left_out"):
        lines.insert(1, f"{stamp['texts_left_out']:,} more texts were left out: a server refuses them as too long")
    if "interrupted" in stamp:
        lines.insert(0, str(stamp["interrupted"]))
    return lines


def comparison_lines(results: LoadResults) -> list[str]:
    """Compare the first server with each of the others, one line each."""
    lines = []
    for one in compare_servers(results):
        parts = [f"{_times(one.saturation)} the correct responses per second at saturation"]
        if one.p99 is not None:
            values = "{:,.1f} against {:,.1f} ms".format(*one.p99_ms)
            parts.append(f"at {one.equal_load_per_s:,.1f} requests/s p99 {values}, {_times(one.p99)} better")
        if one.within_bound is not None:
            values = "{:,.1f} against {:,.1f} requests/s".format(*one.loads_per_s)
            bound = f"within a p99 of {results.p99_bound_ms:,.1f} ms"
            parts.append(f"{bound} {values}, {_times(one.within_bound)} the load")
        lines.append(f"{results.names[0]} against {one.server}: {'; '.join(parts)}")
    return lines


def _times(ratio: float | None) -> str:
    return "?" if ratio is None else "infinitely" if math.isinf(ratio) else f"{ratio:.2f}x"
