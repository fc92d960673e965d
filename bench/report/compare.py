"""Compare two runs: what got slower or faster."""

from __future__ import annotations

from dataclasses import dataclass

from sbert_infer.bench.report.results import Results, Row
from sbert_infer.bench.report.table import number, render_cells


@dataclass(frozen=True)
class Change:
    """One contestant on one workload, before and after."""

    before: Row
    after: Row

    @property
    def ratio(self) -> float | None:
        """Speed after to speed before: above 1 is faster. None unless both are right."""
        if self.before.status == self.after.status == "ok" and self.before.texts_per_s and self.after.texts_per_s:
            return self.after.texts_per_s / self.before.texts_per_s
        return None

    def got_slower(self, tolerance: float) -> bool:
        """Whether it lost more than `tolerance`, or stopped working."""
        stopped = self.before.status == "ok" and self.after.status != "ok"
        return stopped or (self.ratio is not None and self.ratio < 1 - tolerance)


def compare(before: Results, after: Results) -> list[Change]:
    """List the change of every contestant on every workload that both runs have."""
    found = {(row.workload, row.contestant): row for row in after.rows}
    pairs = ((row, found.get((row.workload, row.contestant))) for row in before.rows)
    return [Change(row, later) for row, later in pairs if later is not None]


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


def render_changes(changes: list[Change], tolerance: float) -> str:
    """Render a line for each change, the worst first."""
    ordered = sorted(changes, key=lambda change: (not change.got_slower(tolerance), change.ratio or 0))
    lines = []
    for change in ordered:
        before, after, ratio = change.before, change.after, change.ratio
        verdict = "faster" if ratio is not None and ratio > 1 + tolerance else ""
        if before.status != after.status:
            verdict = f"was {before.status}, is {after.status}"
        elif change.got_slower(tolerance):
            verdict = "SLOWER"
        percent = "-" if ratio is None else f"{ratio - 1:+.1%}"
        speeds = [number(row.texts_per_s, "{:,.0f}") for row in (before, after)]
        lines.append([before.workload, before.contestant, *speeds, percent, verdict])
    return render_cells(["workload", "contestant", "before", "after", "change", ""], lines)
