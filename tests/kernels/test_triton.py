"""Run the checks of the Triton kernels with the installed Triton and with a second, current one.

Each run is a separate process: the interpreter is chosen by an environment variable before Triton
is imported and must not leak into other tests, and a process can hold only one version of Triton.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OTHER = os.environ.get("SBERT_INFER_OTHER_TRITON") or HERE.parents[1] / ".venv" / "triton-current"


@pytest.fixture(params=["installed", "current"])
def triton_folder(request: pytest.FixtureRequest) -> Path:
    """The folder that Triton is imported from."""
    if request.param == "current":
        folder = Path(OTHER).resolve()
        if not (folder / "triton").is_dir():
            pytest.skip(f"no second Triton in {folder}: make setup puts one there, or set SBERT_INFER_OTHER_TRITON")
        return folder
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("Triton is not installed; it exists for Linux only")
    return Path(spec.origin).parents[1]


def run_checks(file: str, triton_folder: Path, cache: Path, **variables: str) -> None:
    path = os.pathsep.join(filter(None, [str(triton_folder), os.environ.get("PYTHONPATH")]))
    variables |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "EXPECTED_TRITON": str(triton_folder)}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take seconds to import, and are not needed
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    run = subprocess.run(command, cwd=HERE.parents[1], env=os.environ | variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout, run.stdout


def test_interpreted(triton_folder: Path, tmp_path: Path) -> None:
    run_checks("interpreted_checks.py", triton_folder, tmp_path, TRITON_INTERPRET="1")


def test_canaries(triton_folder: Path, tmp_path: Path) -> None:
    run_checks("canary_checks.py", triton_folder, tmp_path, TRITON_INTERPRET="1")


def test_compiled(triton_folder: Path, tmp_path: Path) -> None:
    run_checks("compiled_checks.py", triton_folder, tmp_path, TRITON_INTERPRET="0")
