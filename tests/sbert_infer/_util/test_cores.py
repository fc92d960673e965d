"""The number of usable cores respects the container's limits, not only the machine's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sbert_infer._util.cores import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("9900000 100000", 8)],
)
def test_version_2(quota: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3), ("250000", 3), ("50000", 1)])
def test_version_1(quota: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("content", ["", "nonsense", "1 2 3", "a b", "100000 0"])
def test_what_can_not_be_read_is_no_limit(content: str, tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "nowhere") == 8
    (tmp_path / "cpu.max").write_text(content)
    assert usable_cores(tmp_path) == 8


def test_without_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1
