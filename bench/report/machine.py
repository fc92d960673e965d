"""The machine that a result was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from sbert_infer import __version__
from sbert_infer._util.cores import usable_cores
from sbert_infer._util.hardware import cpu_name, instruction_sets, memory_bytes


def machine_stamp() -> dict[str, Any]:
    """Describe the machine: CPU, cores, memory, operating system, Python, versions, date."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "sbert_infer": __version__,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gb": _memory_gb(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        # If it is well above 0 when the run begins, do not trust the figures.
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def busy_warning(stamp: Mapping[str, Any]) -> str | None:
    """Say that the machine was busy when the run began; None if it was not, or that is unknown."""
    load, cores = stamp.get("load_average"), stamp.get("cores")
    if not load or not cores or load <= max(1, cores / 2):
        return None
    return (
        f"The machine was busy when this run began (load {load:g} on {cores} cores): don't trust these figures, "
        "and least of all those of libraries with many threads. Measure again on a quiet machine."
    )


def cpu_model() -> str:
    """The CPU's model name, and the vector instructions that matter here."""
    known = ", ".join(instruction_sets())
    return cpu_name() + (f" ({known})" if known else "")


def _memory_gb() -> float | None:
    size = memory_bytes()
    return None if size is None else round(size / 1e9, 1)
