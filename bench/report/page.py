"""The report as one HTML page that needs nothing from outside: plots, table, stamp."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from sbert_infer.bench.report.charts import latency_chart, quality_chart, throughput_chart
from sbert_infer.bench.report.results import Results, Row
from sbert_infer.bench.report.table import cells, describe_sections, describe_stamp, notes

__all__ = ["html_page", "render_page", "subtitle"]

_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--dim:#667085;--line:#e3e7ee;
--ours:#0b7a75;--rival:#9fb0c6;--eager:#d9a13b;--wrong:#c8443b;--shade:#eef6f5}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2028;--ink:#e6eaf0;--dim:#94a0b3;--line:#2b333f;
--ours:#35c2ba;--rival:#5d6f89;--eager:#d9a13b;--wrong:#f0685e;--shade:#1b2d30}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:28px;margin:0 0 4px;letter-spacing:-.01em}h2{font-size:20px;margin:0 0 2px}
h3{font-size:13px;font-weight:600;margin:26px 0 6px;color:var(--dim);text-transform:uppercase;letter-spacing:.06em}
p{margin:4px 0}.dim{color:var(--dim)}section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:22px 24px;margin-top:22px}.headline{display:flex;gap:14px;flex-wrap:wrap;margin-top:18px}
.headline div{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 18px;min-width:150px}
.headline b{display:block;font-size:26px;color:var(--ours);font-variant-numeric:tabular-nums}
.headline span{color:var(--dim);font-size:13px}
svg{display:block;width:100%;height:auto;overflow:visible;font:13px system-ui,-apple-system,"Segoe UI",sans-serif}
svg text{fill:var(--ink)}svg .name{text-anchor:end}svg .strong{font-weight:650}svg .tick,svg .axis{fill:var(--dim);
font-size:12px}svg .dim{fill:var(--dim)}svg .bad{fill:var(--wrong);font-weight:650}svg .point{font-size:12px}
svg .value{font-variant-numeric:tabular-nums}.grid{stroke:var(--line);fill:none}.lead{stroke:var(--dim);stroke-width:.7}
.spread{stroke:var(--ink);stroke-width:1.4;fill:none;opacity:.65}.ours{fill:var(--ours);stroke:var(--ours)}
.rival{fill:var(--rival);stroke:var(--rival)}.eager{fill:var(--eager);stroke:var(--eager)}
.wrong{fill:url(#hatch);stroke:var(--wrong)}.line{fill:none;stroke-width:3;opacity:.55}
.legend{display:flex;gap:18px;flex-wrap:wrap;color:var(--dim);font-size:13px;margin-top:14px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:6px 9px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:600}th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
tr.mine td{background:var(--shade)}tr.mine td:first-child{font-weight:650}tr.wrong-row td{color:var(--dim)}
td.verdict{color:var(--wrong);font-weight:650}ul{margin:12px 0 0;padding-left:20px;color:var(--dim);font-size:13px}
"""

# In the page once; every plot may use it.
_HATCH = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs><pattern id="hatch" width="7" '
    'height="7" patternTransform="rotate(45)" patternUnits="userSpaceOnUse"><rect width="2.5" height="7" '
    'style="fill:var(--wrong)" stroke="none"/></pattern></defs></svg>'
)
_LEGEND = {"ours": "sbert-infer", "eager": "eager PyTorch reference", "rival": "others", "wrong": "wrong vectors"}


def render_page(results: Results) -> str:
    """The whole page. The figures are inside once more as JSON, for whoever wants to compute with them."""
    title = f"{results.stamp['model']}: sbert-bench"
    parts = [
        f"<h1>{escape(str(results.stamp['model']))}</h1>",
        f'<p class="dim">{escape(subtitle(results.stamp))}</p>',
        _headline(results),
        _legend(results.rows),
        *(_section(name, line, results.of(name), results.noun) for name, line in describe_sections(results).items()),
        _stamp(results),
    ]
    return html_page(title, parts, asdict(results))


def html_page(title: str, parts: Sequence[str], data: dict[str, Any], style: str = "") -> str:
    """A page of `parts` that needs nothing from outside, with `data` inside as JSON."""
    content = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n{_HATCH}\n<main>",
            *parts,
            f'</main>\n<script type="application/json" id="results">{content}</script>\n</body>\n</html>\n',
        ]
    )


def subtitle(stamp: dict[str, Any]) -> str:
    """On what and when it was measured."""
    return f"{stamp['cpu']}, {stamp['cores']} usable cores, {stamp['date']}, sbert-infer {stamp['sbert_infer']}"


def _headline(results: Results) -> str:
    """What ours reach, in large figures."""
    boxes = [
        f"<div><b>{row.speed_up:.2f}x</b><span>{escape(row.contestant)}, {escape(row.workload)}<br>"
        f"{row.texts_per_s:,.0f} {results.noun}/s against eager PyTorch</span></div>"
        for row in results.rows
        if row.ours and row.speed_up is not None
    ]
    return f'<div class="headline">{"".join(boxes)}</div>'


def _legend(rows: Sequence[Row]) -> str:
    used = [kind for kind in _LEGEND if kind != "wrong" or any(row.status == "wrong" for row in rows)]
    items = "".join(f'<span><i style="background:var(--{kind})"></i>{_LEGEND[kind]}</span>' for kind in used)
    return f'<div class="legend">{items}</div>'


def _section(name: str, description: str, rows: Sequence[Row], noun: str) -> str:
    parts = [f"<section>\n<h2>{escape(name)}</h2>", f'<p class="dim">{escape(description)}</p>']
    if any(row.texts_per_s is not None for row in rows):
        parts += ["<h3>Throughput, median and spread over the rounds</h3>", throughput_chart(rows, noun)]
    if any(row.latency_ms for row in rows):
        parts += [f"<h3>Latency, one {noun[:-1]} at a time</h3>", latency_chart(rows, noun)]
    if plot := quality_chart(rows, noun):
        parts += ["<h3>Speed against quality</h3>", plot]
    parts += ["<h3>All figures</h3>", _table(rows, noun)]
    if lines := notes(rows):
        parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")
    return "\n".join([*parts, "</section>"])


def _table(rows: Sequence[Row], noun: str) -> str:
    headings, lines = cells(rows, noun)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(_table_row(row, line) for row, line in zip(rows, lines, strict=True))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _table_row(row: Row, line: list[str]) -> str:
    kind = "mine" if row.ours else "wrong-row" if row.status != "ok" else ""
    verdicts = ("WRONG", "FAILED")
    tds = "".join(f"<td{' class=verdict' if cell in verdicts else ''}>{escape(cell)}</td>" for cell in line)
    return f'<tr class="{kind}">{tds}</tr>'


def _stamp(results: Results) -> str:
    lines = describe_stamp(results.stamp)
    if results.not_installed:
        lines.append(f"not installed: {', '.join(results.not_installed)}")
    if results.workloads:
        lines.append("of peak: share of the FP32 matrix product that the machine reaches, counting no padding")
    items = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<section class="dim"><h2>Measured on</h2>{items}</section>'
