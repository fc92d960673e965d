"""The parts that the HTML pages share: a page that needs nothing from outside, tables, legends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from sbert_infer.bench.report.machine import busy_warning

_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--dim:#667085;--line:#e3e7ee;
--ours:#0b7a75;--rival:#9fb0c6;--eager:#d9a13b;--wrong:#c8443b;--shade:#eef6f5}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2028;--ink:#e6eaf0;--dim:#94a0b3;--line:#2b333f;
--ours:#35c2ba;--rival:#5d6f89;--eager:#d9a13b;--wrong:#f0685e;--shade:#1b2d30}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:32px 20px 64px}
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
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:5px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:600;white-space:normal;vertical-align:bottom}th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
td:first-child{white-space:normal;min-width:11em}
tr.mine td{background:var(--shade)}tr.mine td:first-child{font-weight:650}tr.wrong-row td{color:var(--dim)}
td.verdict{color:var(--wrong);font-weight:650}td.ok{color:var(--ours);font-weight:650}
.busy{border:2px solid var(--wrong);border-radius:12px;padding:12px 18px;margin-top:18px;font-weight:650}
@media(max-width:900px){svg[role=img]{min-width:860px}section{padding:16px 14px}}
ul{margin:12px 0 0;padding-left:20px;color:var(--dim);font-size:13px}
"""

# Included once per page, for all plots.
_HATCH = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs><pattern id="hatch" width="7" '
    'height="7" patternTransform="rotate(45)" patternUnits="userSpaceOnUse"><rect width="2.5" height="7" '
    'style="fill:var(--wrong)" stroke="none"/></pattern></defs></svg>'
)
_CELL_KINDS = {"WRONG": "verdict", "FAILED": "verdict", "MISSED": "verdict", "ok": "ok"}


def html_page(title: str, heading: str, parts: Iterable[str], results: Any, style: str = "") -> str:
    """Render a self-contained page of `parts`, with the dataclass `results` inside as JSON."""
    content = json.dumps(asdict(results), ensure_ascii=False).replace("<", "\\u003c")
    stamp = results.stamp
    subtitle = f"{stamp['cpu']}, {stamp['cores']} usable cores, {stamp['date']}, sbert-infer {stamp['sbert_infer']}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n{_HATCH}\n<main>",
            f'<h1>{escape(heading)}</h1>\n<p class="dim">{escape(subtitle)}</p>',
            *([f'<p class="busy" role="alert">{escape(busy)}</p>'] if (busy := busy_warning(stamp)) else []),
            *parts,
            f'</main>\n<script type="application/json" id="results">{content}</script>\n</body>\n</html>\n',
        ]
    )


def section(heading: str, *parts: str) -> str:
    """Render a section of the page."""
    return "\n".join([f"<section>\n<h2>{escape(heading)}</h2>", *parts, "</section>"])


def headline(figures: Iterable[tuple[str, str, str]], stamp: Mapping[str, Any]) -> str:
    """Render large figures, each with two lines below it; none of a run on a busy machine."""
    if busy_warning(stamp):
        return ""
    boxes = (
        f"<div><b>{escape(figure)}</b><span>{escape(first)}<br>{escape(second)}</span></div>"
        for figure, first, second in figures
    )
    return f'<div class="headline">{"".join(boxes)}</div>'


def legend(colours: Mapping[str, str]) -> str:
    """Render names with their colours."""
    items = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    return f'<div class="legend">{"".join(items)}</div>'


def html_table(
    headings: Sequence[str], lines: Sequence[Sequence[str]], row_kinds: Sequence[str] = (), kind: str = ""
) -> str:
    """Render a table of text cells; kinds are CSS classes, of its rows and of itself."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    rows = zip(lines, row_kinds or [""] * len(lines), strict=True)
    body = "".join(f'<tr class="{row_kind}">{"".join(map(_cell, line))}</tr>' for line, row_kind in rows)
    return f'<div class="scroll {kind}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def measured_on(lines: Iterable[str]) -> str:
    """Render the last section: where and how the results were measured."""
    items = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return f'<section class="dim"><h2>Measured on</h2>{items}</section>'


def _cell(text: str) -> str:
    return f'<td class="{_CELL_KINDS.get(text, "")}">{escape(text)}</td>'
