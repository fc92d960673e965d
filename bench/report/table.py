"""The results as tables: aligned plain text, or markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from sbert_infer.bench.report.results import QUALITY, Results, Row, WorkloadFacts


def number(value: float | None, pattern: str) -> str:
    """Render a number, or a dash if there is none."""
    return "-" if value is None else pattern.format(value)


def _spread(row: Row) -> str:
    return "-" if row.texts_per_s_low is None else f"{row.texts_per_s_low:,.0f}..{row.texts_per_s_high:,.0f}"


def _speed_up(row: Row) -> str:
    if row.speed_up is None:
        return "-" if row.status == "ok" else row.status.upper()
    return f"{row.speed_up:.2f}x"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}" if value < 0.999995 else "1"


# Heading -> how to render a row's cell. The measures of quality come between the two parts.
_BEFORE_QUALITY: dict[str, Callable[[Row], str]] = {
    "contestant": lambda row: row.contestant,
    "type": lambda row: row.family,
    "texts/s": lambda row: number(row.texts_per_s, "{:,.0f}"),
    "min..max": _spread,
    "vs eager": _speed_up,
    "min cos": lambda row: _cosine(row.min_cosine),
    "mean cos": lambda row: _cosine(row.mean_cosine),
    "max error": lambda row: number(row.max_error, "{:.1e}"),
    "correlation": lambda row: _cosine(row.correlation),
}
_AFTER_QUALITY: dict[str, Callable[[Row], str]] = {
    "p50 ms": lambda row: number(row.latency_ms.get("p50"), "{:.1f}"),
    "p95 ms": lambda row: number(row.latency_ms.get("p95"), "{:.1f}"),
    "p99 ms": lambda row: number(row.latency_ms.get("p99"), "{:.1f}"),
    "tokens/s": lambda row: number(row.tokens_per_s, "{:,.0f}"),
    "of peak": lambda row: number(row.peak_share, "{:.0%}"),
    "of own peak": lambda row: number(row.own_peak_share, "{:.0%}"),
    "padding": lambda row: number(row.padding, "{:.1%}"),
    "CPU s/1k": lambda row: number(row.cpu_s_per_1000, "{:.2f}"),
    "peak MB": lambda row: number(row.peak_mb, "{:,.0f}"),
    "load s": lambda row: number(row.load_s, "{:.1f}"),
    "file MB": lambda row: number(row.file_mb, "{:.0f}"),
    "batch": lambda row: "tokens" if row.ours and row.seconds else number(row.batch_size, "{}"),
}
_LEFT = ("workload", "contestant", "type", "level", "what", "")  # aligned to the left


def render_table(results: Results, *, markdown: bool = False) -> str:
    """Render all results, workload by workload."""
    parts = []
    for name, description in describe_sections(results).items():
        rows = results.of(name)
        heading = f"**{name}**" if markdown else name
        parts.append(f"{heading}: {description}")
        parts.append(render_cells(*cells(rows, results.noun), markdown=markdown))
        parts.append("\n".join(f"{'- ' if markdown else '  '}{note}" for note in notes(rows)))
    if results.not_installed:
        parts.append(f"not installed: {', '.join(results.not_installed)}")
    parts.append("\n".join(f"{'- ' if markdown else ''}{line}" for line in describe_stamp(results.stamp)))
    return "\n\n".join(part for part in parts if part)


def describe_sections(results: Results) -> dict[str, str]:
    """Map each section, a workload or quality alone, to a line about it."""
    if not results.workloads:
        return {QUALITY: "; ".join(results.stamp[QUALITY])}
    return {facts.name: describe_workload(facts, results.noun) for facts in results.workloads}


def cells(rows: Sequence[Row], noun: str = "texts") -> tuple[list[str], list[list[str]]]:
    """Render headings and cells, without columns that are empty for all rows."""
    measures = dict.fromkeys(name for row in rows for name in row.quality)
    columns = {
        **{name: [render(row) for row in rows] for name, render in _BEFORE_QUALITY.items()},
        **{name: [number(row.quality.get(name), "{:.4f}") for row in rows] for name in measures},
        **{name: [render(row) for row in rows] for name, render in _AFTER_QUALITY.items()},
    }
    kept = {name: column for name, column in columns.items() if any(cell != "-" for cell in column)}
    headings = [name.replace("texts/s", f"{noun}/s") for name in kept]
    return headings, [list(line) for line in zip(*kept.values(), strict=True)]


def render_cells(headings: list[str], lines: list[list[str]], *, markdown: bool = False) -> str:
    """Render a table of cells that are already text."""
    if markdown:
        rule = ["---" if heading in _LEFT else "--:" for heading in headings]
        return "\n".join(f"| {' | '.join(line)} |" for line in [headings, rule, *lines])
    columns = zip(headings, *lines, strict=True)
    template = "  ".join(f"{{:{'<' if column[0] in _LEFT else '>'}{max(map(len, column))}}}" for column in columns)
    return "\n".join(template.format(*line).rstrip() for line in [headings, *lines])


def notes(rows: Sequence[Row]) -> list[str]:
    """Say why rows are wrong or failed, and what else there is to note."""
    return [
        f"{row.contestant}: {'; '.join(filter(None, [row.reason, row.note]))}" for row in rows if row.reason or row.note
    ]


def describe_workload(facts: WorkloadFacts, noun: str) -> str:
    """Describe a workload in one line."""
    mean = facts.tokens / facts.texts
    line = f"{facts.texts:,} {noun}, {facts.tokens:,} tokens (mean {mean:.0f}, max {facts.longest})"
    if facts.truncated:
        line += f", {facts.truncated} {noun[:-1] if facts.truncated == 1 else noun} cut to the model's limit"
    peak = f"{median(facts.peak_gflops):,.0f} GFLOP/s" if facts.peak_gflops else "not measured"
    others = "".join(f", {family} {median(found):,.0f}" for family, found in facts.own_peaks.items() if found)
    return f"{line}; {facts.gflop:,.1f} GFLOP without padding, {facts.peak_of} matrix product peak {peak}{others}"


def describe_stamp(stamp: dict[str, Any]) -> list[str]:
    """Say where, when and with what versions it was measured."""
    speed = f"{stamp['rounds']} rounds, seed {stamp['seed']}, " if stamp["workloads"] else ""
    lines = [
        f"{stamp['model']} (weights {stamp['weights_sha256'][:12]}, up to {stamp['max_length']} tokens), "
        f"{speed}{stamp['date']}, sbert-infer {stamp['sbert_infer']}",
        f"{stamp['cpu']}, {stamp['cores']} usable cores, {stamp['memory_gb']} GB, {stamp['os']}, "
        f"load average {stamp['load_average']} at the start",
        f"Python {stamp['python']}: {_versions(stamp['packages'])}",
    ]
    if stamp.get("gpu"):
        lines.insert(1, str(stamp["gpu"]))
    if speed and stamp.get(QUALITY):
        lines.insert(1, f"quality on {'; '.join(stamp[QUALITY])}")
    if "interrupted" in stamp:
        lines.insert(0, str(stamp["interrupted"]))
    if stamp["rivals_packages"] is not None:
        lines.append(f"rivals in Python {stamp['rivals_python']}: {_versions(stamp['rivals_packages'])}")
    return lines


def _versions(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
