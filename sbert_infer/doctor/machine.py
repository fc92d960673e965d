"""The machine: Python, operating system, CPU, memory, NVIDIA driver and GPUs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from sbert_infer._util.cores import cpu_quota, usable_cores
from sbert_infer._util.hardware import cpu_name, instruction_sets, memory_bytes, memory_limit
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.errors import EngineError

_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a vendor, and the class of displays and 3D controllers


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver shows."""

    name: str
    target: str  # such as sm89
    memory_gb: float


@dataclass(frozen=True)
class Machine:
    """What a machine has. None stands for what is unknown, or without a limit."""

    python: str
    os: str
    cpu: str
    instructions: tuple[str, ...]
    cores: int | None
    usable_cores: int
    cpu_quota: float | None
    memory_gb: float | None
    memory_limit_gb: float | None
    nvidia_cards: int  # that the bus shows, with or without a driver
    driver_problem: str | None
    driver_release: str | None
    driver_cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]


def look_at_machine() -> Machine:
    """Ask for all of it. Safe on any machine."""
    problem = cuda.driver_problem()
    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        instructions=tuple(instruction_sets()),
        cores=os.cpu_count(),
        usable_cores=usable_cores(),
        cpu_quota=cpu_quota(),
        memory_gb=_gb(memory_bytes()),
        memory_limit_gb=_gb(memory_limit()),
        nvidia_cards=nvidia_cards(),
        driver_problem=problem,
        driver_release=cuda.driver_release(),
        driver_cuda=cuda.driver_cuda(),
        gpus=() if problem else _gpus(),
    )


def nvidia_cards(pci: Path = _PCI) -> int:
    """Return how many NVIDIA GPUs the bus shows, which needs no driver. 0 if that is unknown."""
    try:
        devices = list(pci.iterdir())
    except OSError:
        return 0
    return sum(_read(device / "vendor") == _NVIDIA and _read(device / "class")[:4] == _DISPLAY for device in devices)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _gpus() -> tuple[Gpu, ...]:
    try:
        return tuple(
            Gpu(cuda.device_name(gpu), cuda.compute_capability(gpu), _gb(cuda.device_memory(gpu)) or 0.0)
            for gpu in range(cuda.device_count())
        )
    except EngineError:  # a GPU that fell off the bus, say; `driver_problem` has found the others
        return ()


def _gb(size: int | None) -> float | None:
    return None if size is None else round(size / 1e9, 1)
