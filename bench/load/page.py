"""The results of a load test as one HTML page."""

from __future__ import annotations

from html import escape

from sbert_infer.bench.load.charts import COLOURS, goodput_chart, latency_against_load
from sbert_infer.bench.load.results import SATURATION, LoadResults
from sbert_infer.bench.load.table import comparison_lines, describe_load, goal_cells, load_cells
from sbert_infer.bench.report.html_parts import headline, html_page, html_table, legend, measured_on, section

_SERVER_COLOURS = ("var(--ours)", "var(--eager)", "#7c6fd6", "#c45f9b", "var(--rival)")
_STYLE = """
.curve{fill:none;stroke-width:1.6}.curve.p99{stroke-width:3}.curve.p50{stroke-dasharray:2 4}.p95{opacity:.6}
.p50{opacity:.6}.dot.hollow{fill:var(--card)}.saturation{fill:none;stroke-width:1.4;stroke-dasharray:8 5}
.bound{fill:none;stroke:var(--dim);stroke-dasharray:2 3}
.levels th:nth-child(2),.levels td:nth-child(2){text-align:right}
""" + "".join(
    f".s{place}{{stroke:{colour}}}.dot.s{place}{{fill:{colour}}}" for place, colour in enumerate(_SERVER_COLOURS)
)


def render_load_page(results: LoadResults) -> str:
    """Render the whole page."""
    names = ", ".join(results.names)
    most = {name: results.row(name, SATURATION) for name in results.names}
    compared = "".join(f"<p>{escape(line)}</p>" for line in comparison_lines(results))
    parts = [
        headline(
            ((f"{row.texts_per_s:,.0f}", name, "correct texts/s at most") for name, row in most.items() if row),
            results.stamp,
        ),
        legend({name: _SERVER_COLOURS[place % COLOURS] for place, name in enumerate(results.names)}),
        f"<section>{compared}</section>" if compared else "",
        section(
            "Latency against load",
            latency_against_load(results),
            '<p class="dim">Thick: p99. Thin: p95. Dotted: p50. Dashed vertical line: the most that the server '
            "handles. Hollow: it does not keep up.</p>",
        ),
        section("Goodput against load", goodput_chart(results)),
    ]
    for server in results.servers:
        name, about = server["name"], f"{server['url']}, model {server['model']}"
        tables = [html_table(*goal_cells(results, name)), html_table(*load_cells(results.of(name)), kind="levels")]
        parts.append(section(name, f'<p class="dim">{escape(about)}</p>', tables[0], "<h3>All levels</h3>", tables[1]))
    parts.append(measured_on(describe_load(results.stamp)))
    return html_page(f"{names}: sbert-bench --serve", f"{names} under load", parts, results, _STYLE)
