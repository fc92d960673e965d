"""The machine that a result was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sbert_infer import __version__
from sbert_infer._util.cores import usable_cores


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


def cpu_model() -> str:
    """The CPU's model name, and the vector instructions that matter here."""
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    name = info.partition("model name")[2].partition(":")[2].partition("\n")[0].strip()
    flags = set(info.partition("flags")[2].partition("\n")[0].split())
    known = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8") if flag in flags]
    return f"{name or platform.machine()}" + (f" ({', '.join(known)})" if known else "")


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, encoding="utf-8", check=False)  # noqa: S603, S607
    except OSError:
        return ""
    return done.stdout.strip()
