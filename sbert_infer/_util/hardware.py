"""The CPU's name and instruction sets, and the machine's memory."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")
# What Linux calls the instructions that matter to matrix products -> what people call them.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_int8": "AMX INT8",
    "amx_bf16": "AMX BF16",
    "asimddp": "NEON dot product",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
}


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the CPU's model name."""
    name = _field(cpuinfo, "model name") or _sysctl("machdep.cpu.brand_string")
    return name or platform.processor() or platform.machine()


def instruction_sets(cpuinfo: Path = _CPUINFO) -> list[str]:
    """Return the vector and matrix instructions that the CPU has; none if that is unknown."""
    flags = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]


def memory_bytes() -> int | None:
    """Return the size of the machine's memory; None if that is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """Return the container's limit in bytes, if it is below the machine's memory."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup version 2 or 1
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):
            continue
        return limit if limit < (memory_bytes() or 0) else None
    return None


def _field(cpuinfo: Path, name: str) -> str:
    """Return the first value of this name in /proc/cpuinfo."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(values, "")


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, encoding="utf-8", check=False)  # noqa: S603, S607
    except OSError:
        return ""
    return done.stdout.strip()
