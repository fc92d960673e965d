"""The CUDA that installed packages are made for, and whether the NVIDIA driver runs it.

A driver runs packages made for its own major version of CUDA and for older ones. A package made for
a newer one fails late, with cudaErrorInsufficientDriver, so it is told from the names and versions
of what is installed, before it is used and without importing it:

| package         | made for CUDA                                             |
|-----------------|-----------------------------------------------------------|
| tensorrt        | the NN of tensorrt-cuNN-libs, which `tensorrt` depends on |
| tensorrt_rtx    | the NN of tensorrt-rtx-cuNN-libs                          |
| cuda-bindings   | its own major version                                     |
| onnxruntime-gpu | `cuda_version` in onnxruntime/capi                        |
| torch           | `cuda` in torch/version.py                                |

Where that is not known, as for TensorRT from a system package, nothing is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from sbert_infer.backends.tensorrt import cuda

# CUDA -> the oldest driver that runs it. NVIDIA: CUDA Compatibility, "Minor Version Compatibility".
OLDEST_DRIVER = {12: 525, 13: 580}
_MAJORS = range(11, 20)


def driver_too_old(package: str) -> str | None:
    """Return why the driver can't run `package`, and what to do; None if it can, or is missing."""
    there, needed = cuda.driver_cuda(), made_for(package)
    if there is None or needed is None or needed <= there[0]:
        return None
    driver = f"NVIDIA driver {OLDEST_DRIVER[needed]} or newer" if needed in OLDEST_DRIVER else "a newer NVIDIA driver"
    cure = replacement(package, there[0])
    return (
        f"{package} {version(package)} is made for CUDA {needed}, which needs {driver}, and this driver has CUDA "
        f"{there[0]}.{there[1]}: update the driver" + (f", or {cure}" if cure else "")
    )


def made_for(package: str) -> int | None:
    """Return the major version of CUDA that an installed package is made for; None if unknown."""
    return _MADE_FOR[package]()


def version(package: str) -> str | None:
    """Return the version of an installed package, by its name for pip or of its module."""
    names = [package, *(f"{package}_cu{major}" for major in _MAJORS)]
    return next((found for name in names if (found := _installed(name))), None)


def replacement(package: str, major: int) -> str:
    """Return the command that installs `package` for CUDA `major`; empty if there is none."""
    if major < min(OLDEST_DRIVER):
        return ""
    if package in ("tensorrt", "tensorrt_rtx"):
        # The packages for CUDA 12 and 13 have the same files, so what is there must go first.
        new = f"{package.replace('_', '-')}-cu{major}"
        there = " ".join(tensorrt_packages(package))
        return f"pip uninstall -y {there} && pip install {new} 'cuda-bindings<{major + 1}'"
    return {  # on PyPI, the last versions for CUDA 12 are onnxruntime-gpu 1.26 and torch 2.10
        "cuda-bindings": f"pip install 'cuda-bindings<{major + 1}'",
        "onnxruntime-gpu": "pip install 'onnxruntime-gpu[cuda,cudnn]<1.27'",
        "torch": "pip install 'torch<2.11'",
    }[package]


def tensorrt_packages(module: str) -> list[str]:
    """Return the names for pip of the installed parts of a TensorRT, for whichever CUDA."""
    kinds = [f"cu{major}{part}" for major in _MAJORS for part in ("", "-libs", "-bindings")]
    names = [module.replace("_", "-"), *(f"{module.replace('_', '-')}-{kind}" for kind in kinds)]
    return [name for name in names if _installed(name)]


def tensorrt_majors(module: str) -> list[int]:
    """Return the versions of CUDA that TensorRT's libraries are installed for. One is right."""
    return [major for major in _MAJORS if _installed(f"{module}_cu{major}_libs")]


def _in_file(package: str, path: str, pattern: str) -> int | None:
    """Return the number that `pattern` finds in a file of an installed package."""
    try:
        text = Path(str(metadata.distribution(package).locate_file(path))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return None
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else None


def _made_for_bindings() -> int | None:
    found = re.match(r"\d+", _installed("cuda-bindings") or "")
    return int(found[0]) if found else None


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_MADE_FOR: dict[str, Callable[[], int | None]] = {
    "tensorrt": lambda: max(tensorrt_majors("tensorrt"), default=None),
    "tensorrt_rtx": lambda: max(tensorrt_majors("tensorrt_rtx"), default=None),
    "cuda-bindings": _made_for_bindings,
    "onnxruntime-gpu": lambda: _in_file(
        "onnxruntime-gpu", "onnxruntime/capi/build_and_package_info.py", r"^cuda_version *= *['\"](\d+)"
    ),
    "torch": lambda: _in_file("torch", "torch/version.py", r"^cuda\b[^=]*= *['\"](\d+)"),
}
