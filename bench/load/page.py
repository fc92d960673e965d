"""The results of a run of load as one HTML page that needs nothing from outside."""

from __future__ import annotations

from dataclasses import asdict
from html import escape

from sbert_infer.bench.load.charts import COLOURS, goodput_chart, latency_against_load
from sbert_infer.bench.load.results import SATURATION, LoadResults
from sbert_infer.bench.load.table import Cells, bar_cells, comparison_lines, describe_load, load_cells
from sbert_infer.bench.report.page import html_page, subtitle

__all__ = ["render_load_page"]

_SERVER_COLOURS = ("var(--ours)", "var(--eager)", "#7c6fd6", "#c45f9b", "var(--rival)")
_STYLE = """
.curve{fill:none;stroke-width:1.6}.curve.p99{stroke-width:3}.curve.p50{stroke-dasharray:2 4}.p95{opacity:.6}
.p50{opacity:.6}.dot.hollow{fill:var(--card)}.saturation{fill:none;stroke-width:1.4;stroke-dasharray:8 5}
.bound{fill:none;stroke:var(--dim);stroke-dasharray:2 3}
.levels th:nth-child(2),.levels td:nth-child(2){text-align:right}
td.ok{color:var(--ours);font-weight:650}
""" + "".join(
    f".s{place}{{stroke:{colour}}}.dot.s{place}{{fill:{colour}}}" for place, colour in enumerate(_SERVER_COLOURS)
)


def render_load_page(results: LoadResults) -> str:
    """The whole page. The figures are inside once more as JSON."""
    parts = [
        f"<h1>{escape(', '.join(results.names))} under load</h1>",
        f'<p class="dim">{escape(subtitle(results.stamp))}</p>',
        _headline(results),
        _legend(results),
        _comparisons(results),
        f"<section>\n<h2>Latency against load</h2>\n{latency_against_load(results)}\n"
        '<p class="dim">Thick: p99. Thin: p95. Dotted: p50. Dashed upright: the most that the server answers. '
        "Hollow: it does not keep up.</p>\n</section>",
        f"<section>\n<h2>Goodput against load</h2>\n{goodput_chart(results)}\n</section>",
        *(_section(results, name) for name in results.names),
        _stamp(results),
    ]
    return html_page(f"{', '.join(results.names)}: sbert-bench --serve", parts, asdict(results), _STYLE)


def _headline(results: LoadResults) -> str:
    boxes = []
    for name in results.names:
        most = results.row(name, SATURATION)
        if most is not None:
            boxes.append(
                f"<div><b>{most.texts_per_s:,.0f}</b><span>{escape(name)}<br>right texts/s at most</span></div>"
            )
    return f'<div class="headline">{"".join(boxes)}</div>'


def _legend(results: LoadResults) -> str:
    items = [
        f'<span><i style="background:{_SERVER_COLOURS[place % COLOURS]}"></i>{escape(name)}</span>'
        for place, name in enumerate(results.names)
    ]
    return f'<div class="legend">{"".join(items)}</div>'


def _section(results: LoadResults, name: str) -> str:
    server = next(one for one in results.servers if one["name"] == name)
    about = f"{server['url']}, model {server['model']}"
    tables = _table(bar_cells(results, name)) + "<h3>All levels</h3>" + _table(load_cells(results.of(name)), "levels")
    return f'<section>\n<h2>{escape(name)}</h2>\n<p class="dim">{escape(about)}</p>\n{tables}\n</section>'


def _table(cells: Cells, kind: str = "") -> str:
    headings, lines = cells
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, line))}</tr>" for line in lines)
    return f'<div class="scroll {kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    kind = {"MISSED": ' class="verdict"', "ok": ' class="ok"'}.get(text, "")
    return f"<td{kind}>{escape(text)}</td>"


def _comparisons(results: LoadResults) -> str:
    lines = comparison_lines(results)
    return f"<section>{''.join(f'<p>{escape(line)}</p>' for line in lines)}</section>" if lines else ""


def _stamp(results: LoadResults) -> str:
    items = "".join(f"<p>{escape(line)}</p>" for line in describe_load(results.stamp))
    return f'<section class="dim"><h2>Measured on</h2>{items}</section>'
