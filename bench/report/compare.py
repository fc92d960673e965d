"""Compare two runs: what got slower or faster."""

from __future__ import annotations

from dataclasses import dataclass

from sbert_infer.bench.report.results import Results, Row
from sbert_infer.bench.report.table import render_cells

__all__ = ["Change", "compare", "render_changes", "warnings"]


@dataclass(frozen=True)
class Change:
    """One contestant on one workload, before and after."""

    workload: str
    contestant: str
    ours: bool
    before: float | None  # texts/s
    after: float | None
    ratio: float | None  # above 1 is faster; None if it is unknown
    remark: str = ""

    def got_slower(self, tolerance: float) -> bool:
        """Whether it lost more than `tolerance`, or stopped working."""
        return self.remark.startswith("was ok") or (self.ratio is not None and self.ratio < 1 - tolerance)


def compare(before: Results, after: Results) -> list[Change]:
    """List the change of every contestant on every workload that both runs have."""
    found = {(row.workload, row.contestant): row for row in after.rows}
    pairs = ((row, found.get((row.workload, row.contestant))) for row in before.rows)
    return [_change(row, later) for row, later in pairs if later is not None]


def warnings(before: Results, after: Results) -> list[str]:
    """Say what makes the two runs hard to compare."""
    kinds = {"cpu": "CPU", "cores": "usable cores", "weights_sha256": "weights", "seed": "seed"}
    lines = [
        f"the runs differ in {name}: {before.stamp[key]} and {after.stamp[key]}"
        for key, name in kinds.items()
        if before.stamp[key] != after.stamp[key]
    ]
    sizes = {facts.name: (facts.texts, facts.tokens) for facts in before.workloads}
    for facts in after.workloads:
        texts, tokens = sizes.get(facts.name, (facts.texts, facts.tokens))
        if (texts, tokens) != (facts.texts, facts.tokens):
            lines.append(f"'{facts.name}' had {texts} texts of {tokens} tokens, then {facts.texts} of {facts.tokens}")
    return lines


def _change(before: Row, after: Row) -> Change:
    ratio, remark = None, ""
    if before.status == after.status == "ok" and before.texts_per_s and after.texts_per_s:
        ratio = after.texts_per_s / before.texts_per_s
    elif before.status != after.status:
        remark = f"was {before.status}, is {after.status}"
    return Change(before.workload, before.contestant, before.ours, before.texts_per_s, after.texts_per_s, ratio, remark)


def render_changes(changes: list[Change], tolerance: float) -> str:
    """Render a line for each change, the worst first."""
    ordered = sorted(changes, key=lambda change: (not change.got_slower(tolerance), change.ratio or 0))
    lines = []
    for change in ordered:
        speeds = ["-" if speed is None else f"{speed:,.0f}" for speed in (change.before, change.after)]
        percent = "-" if change.ratio is None else f"{change.ratio - 1:+.1%}"
        verdict = change.remark or ("SLOWER" if change.got_slower(tolerance) else "")
        if not verdict and change.ratio is not None and change.ratio > 1 + tolerance:
            verdict = "faster"
        lines.append([change.workload, change.contestant, *speeds, percent, verdict])
    return render_cells(["workload", "contestant", "before", "after", "change", ""], lines)
