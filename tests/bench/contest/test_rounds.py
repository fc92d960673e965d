"""The machine's peaks, measured beside the contestants."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbert_infer.bench.contest import rounds
from sbert_infer.bench.contest.lineup import Contestant
from sbert_infer.bench.contest.rounds import Contest, Entrant
from sbert_infer.bench.errors import WorkerError
from sbert_infer.bench.report.results import WorkloadFacts
from sbert_infer.bench.report.table import describe_workload
from sbert_infer.bench.report.verdict import score


class Machine:
    """A worker whose CPU has no BF16 instruction."""

    def ask(self, command: str, *, precision: str, **_: Any) -> dict[str, float]:
        if precision == "bf16":
            raise WorkerError("killed by SIGILL", 4)
        return {"gflops": 100.0 if precision == "fp32" else 400.0}

    def close(self) -> None:
        """Do nothing: there is no process."""


@pytest.fixture
def peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Peaks of two rounds."""
    monkeypatch.setattr(rounds, "RemoteWorker", Machine)
    with closing(Contest(tmp_path)) as contest:
        contest.entrants = [Entrant(Contestant(family, family, {})) for family in ("fp32", "bf16", "int8")]
        for _ in range(2):
            contest.measure_machine(1)
        return contest.peaks


def test_a_peak_that_crashes_is_unknown(peaks: dict[str, list[float]]) -> None:
    assert peaks == {"fp32": [100.0, 100.0], "bf16": [], "int8": [400.0, 400.0]}


def test_shares_of_the_peak_are_of_the_precision_that_runs(peaks: dict[str, list[float]]) -> None:
    own = {precision: tuple(found) for precision, found in peaks.items() if precision != "fp32"}
    facts = WorkloadFacts("short", 10, 100, 10, 0, 50.0, tuple(peaks["fp32"]), own_peaks=own)
    turn = {"seconds": 1.0, "cpu_seconds": 1.0, "peak_mb": 1.0, "padding": None}
    entrants = [
        Entrant(Contestant(family, family, {"model": ""}), turns=[turn, turn], cosines=[np.ones(2)])
        for family in ("fp32", "bf16", "int8")
    ]
    assert {row.family: (row.peak_share, row.own_peak_share) for row in score(entrants, facts)} == {
        "fp32": (0.5, 0.5),
        "bf16": (0.5, None),
        "int8": (0.5, 0.125),
    }
    assert "FP32 matrix product peak 100 GFLOP/s, int8 400" in describe_workload(facts, "texts")
