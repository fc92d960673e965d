"""Without a GPU, `make test-gpu` and `make bench-gpu` say so in one line and make nothing."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sbert_infer.bench.needs_gpu import gpu_problem
from tests.repository.sources import ROOT


def driver(code: int = 0, gpus: int = 1) -> Any:
    def count(target: Any) -> int:
        target._obj.value = gpus
        return 0

    return SimpleNamespace(cuInit=lambda flags: code, cuDeviceGetCount=count)


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (None, "there is no NVIDIA driver"),
        (driver(code=803), "the NVIDIA driver does not start (error 803)"),
        (driver(gpus=0), "the NVIDIA driver sees none"),
        (driver(), None),
    ],
)
def test_a_driver(there: Any, problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if there is None:
            raise OSError(name)
        return there

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert gpu_problem() == problem


@pytest.mark.skipif(gpu_problem() is None, reason="this machine has a GPU")
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_without_a_gpu_nothing_is_made(target: str, tmp_path: Path) -> None:
    needed = ("bench/needs_gpu.py", "sbert_infer/doctor/requirements.py")
    files = ("Makefile", "pyproject.toml", "constraints.txt", *needed)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # As a person starts it: the variables of a make that runs these tests change what it prints.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", target], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == f"no GPU: {gpu_problem()}"
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == set(files)
