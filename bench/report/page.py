"""The results as one HTML page: plots, table, stamp."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sbert_infer.bench.report.charts import latency_chart, quality_chart, throughput_chart
from sbert_infer.bench.report.html_parts import headline, html_page, html_table, legend, measured_on, section
from sbert_infer.bench.report.results import Results, Row
from sbert_infer.bench.report.table import cells, describe_sections, describe_stamp, notes

_LEGEND = {"ours": "sbert-infer", "eager": "eager PyTorch reference", "rival": "others", "wrong": "wrong vectors"}


def render_page(results: Results) -> str:
    """Render the whole page."""
    shown = [kind for kind in _LEGEND if kind != "wrong" or any(row.status == "wrong" for row in results.rows)]
    lines = describe_stamp(results.stamp)
    if results.not_installed:
        lines.append(f"not installed: {', '.join(results.not_installed)}")
    if results.workloads:
        lines.append("of peak: share of the FP32 matrix product that the machine reaches, counting no padding")
        if any(facts.own_peaks for facts in results.workloads):
            lines.append("of own peak: the same, of a product in the type that the contestant runs in")
    parts = [
        headline(_figures(results), results.stamp),
        legend({_LEGEND[kind]: f"var(--{kind})" for kind in shown}),
        *(_section(name, line, results.of(name), results.noun) for name, line in describe_sections(results).items()),
        measured_on(lines),
    ]
    model = str(results.stamp["model"])
    return html_page(f"{model}: sbert-bench", f"{model}: speed and exactness, measured by sbert-bench", parts, results)


def _figures(results: Results) -> list[tuple[str, str, str]]:
    return [
        (
            f"{row.speed_up:.2f}x",
            f"{row.contestant}, {row.workload}",
            f"{row.texts_per_s:,.0f} {results.noun}/s against eager PyTorch",
        )
        for row in results.rows
        if row.ours and row.speed_up is not None
    ]


def _section(name: str, description: str, rows: Sequence[Row], noun: str) -> str:
    parts = [f'<p class="dim">{escape(description)}</p>']
    if any(row.texts_per_s is not None for row in rows):
        parts += ["<h3>Throughput, median and spread over the rounds</h3>", throughput_chart(rows, noun)]
    if any(row.latency_ms for row in rows):
        parts += [f"<h3>Latency, one {noun[:-1]} at a time</h3>", latency_chart(rows, noun)]
    if plot := quality_chart(rows, noun):
        parts += ["<h3>Speed against quality</h3>", plot]
    kinds = ["mine" if row.ours else "wrong-row" if row.status != "ok" else "" for row in rows]
    parts += ["<h3>All figures</h3>", html_table(*cells(rows, noun), kinds)]
    if lines := notes(rows):
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")
    return section(name, *parts)
