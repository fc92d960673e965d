"""The packages that matter here: their versions, and whether they can be imported."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from sbert_infer.backends.onnxruntime_install import installed_packages
from sbert_infer.backends.openvino_install import why_no_bf16
from sbert_infer.backends.tensorrt.cuda_packages import made_for, tensorrt_majors, version

# Module -> its names for pip.
MODULES = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx",),
    "cuda.bindings.runtime": ("cuda-bindings",),
    "torch": ("torch",),
    "triton": ("triton",),
    "openvino": ("openvino",),
    "tokenizers": ("tokenizers",),
    "numpy": ("numpy",),
}
_PROBE = Path(__file__).with_name("probe.py")
_TIMEOUT_S = 300.0  # importing torch takes long on a busy machine or a slow disk


@dataclass(frozen=True)
class Package:
    """A package, and what importing it in a process of its own has shown."""

    name: str  # for pip
    version: str | None = None  # None: not installed
    error: str | None = None  # why it can't be imported
    cuda: int | None = None  # the major version of CUDA that it is made for, if known
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Packages:
    """All of them, and what only their metadata tells."""

    found: dict[str, Package]  # by name for pip; one of the two onnxruntimes stands for both
    onnxruntimes: tuple[str, ...]  # which of onnxruntime and onnxruntime-gpu are installed
    tensorrt_majors: dict[str, tuple[int, ...]]  # CUDA versions of the TensorRTs that are installed
    torch_triton: str | None  # what torch requires of triton

    def __getitem__(self, name: str) -> Package:
        return self.found[name]


def look_at_packages() -> Packages:
    """Look at all packages, several at a time."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(_look_at, MODULES))
    majors = {module: tuple(tensorrt_majors(module)) for module in ("tensorrt", "tensorrt_rtx")}
    return Packages({package.name: package for package in found}, tuple(installed_packages()), majors, _torch_triton())


def _look_at(module: str) -> Package:
    names = MODULES[module]
    there = [name for name in names if version(name)]
    if not there and not _exists(module):
        return Package(names[0])
    distribution = there[-1] if there else names[0]
    answer, error = probe(module)
    found = answer.get("version") or version(distribution) or "unknown"
    package = distribution if module == "onnxruntime" else names[0]
    facts = answer.get("facts", {})
    if module == "openvino" and error is None:  # tried: some CPUs announce it and crash
        facts = {"bf16": why_no_bf16() is None}
    return Package(names[0], found, error, made_for(package) if package in _WITH_CUDA else None, facts)


_WITH_CUDA = ("onnxruntime-gpu", "tensorrt", "tensorrt_rtx", "cuda-bindings", "torch")


def probe(module: str, paths: Sequence[str] | None = None) -> tuple[dict[str, Any], str | None]:
    """Import `module` in another process; return what it says, or why that failed."""
    command = [sys.executable, str(_PROBE), json.dumps(list(sys.path if paths is None else paths)), module]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"importing it took longer than {_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer, None
    return {}, end_of_process(done.returncode, done.stderr)


def end_of_process(code: int, stderr: str) -> str:
    """Return why a process failed: the signal that ended it, or the last line of its traceback."""
    if code < 0:
        return f"it crashed ({signal.Signals(-code).name})"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with code {code}"


def _exists(module: str) -> bool:
    """Whether there is such a module, even if pip knows nothing of it, as with system packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent does not exist, or is broken
        return False


def _torch_triton() -> str | None:
    try:
        needs = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return None
    found = [match[1] for need in needs if (match := re.match(r"triton *\(?== *([\w.]+)", need))]
    return found[0] if found else None
