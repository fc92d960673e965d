"""How many cores this process may actually use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """The CPU affinity of this process, capped by the container's quota, rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPU time per wall time that the cgroup (version 2 or 1) grants; None without a limit."""
    try:
        if (v2 := cgroup / "cpu.max").exists():
            quota, period = v2.read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
