"""The results of a load test as one HTML page."""

from __future__ import annotations

from html import escape

from sbert_infer.bench.load.charts import COLOURS, goodput_chart, latency_against_load
from sbert_infer.bench.load.results import SATURATION, LoadResults
from sbert_infer.bench.load.table import comparison_lines, describe_load, goal_cells, load_cells
from sbert_infer.bench.report.html_parts import headline, html_page, html_table, legend, measured_on

__all__ = ["render_load_page"]

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
    parts = [
        headline(_figures(results)),
        legend({name: _SERVER_COLOURS[place % COLOURS] for place, name in enumerate(results.names)}),
        _comparisons(results),
        f"<section>\n<h2>Latency against load</h2>\n{latency_against_load(results)}\n"
        '<p class="dim">Thick: p99. Thin: p95. Dotted: p50. Dashed vertical line: the most that the server handles. '
        "Hollow: it does not keep up.</p>\n</section>",
        f"<section>\n<h2>Goodput against load</h2>\n{goodput_chart(results)}\n</section>",
        *(_section(results, name) for name in results.names),
        measured_on(describe_load(results.stamp)),
    ]
    return html_page(f"{names}: sbert-bench --serve", f"{names} under load", parts, results, _STYLE)


def _figures(results: LoadResults) -> list[tuple[str, str, str]]:
    rows = {name: results.row(name, SATURATION) for name in results.names}
    return [
        (f"{row.texts_per_s:,.0f}", name, "correct texts/s at most") for name, row in rows.items() if row is not None
    ]


def _comparisons(results: LoadResults) -> str:
    lines = comparison_lines(results)
    return f"<section>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</section>" if lines else ""


def _section(results: LoadResults, name: str) -> str:
    server = next(one for one in results.servers if one["name"] == name)
    return "\n".join(
        [
            f"<section>\n<h2>{escape(name)}</h2>",
            f'<p class="dim">{escape(server["url"])}, model {escape(server["model"])}</p>',
            html_table(*goal_cells(results, name)),
            "<h3>All levels</h3>",
            html_table(*load_cells(results.of(name)), kind="levels"),
            "</section>",
        ]
    )
