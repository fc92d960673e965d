"""Scripts with real libraries, run in the environment that tests/libraries.txt describes.

It takes minutes and gigabytes to make, so only `make test-libraries` does. Some of the libraries
are also in the environment of tests/clients.txt, where `make test` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "libraries"
_ALL = Path(os.environ.get("SBERT_INFER_LIBRARIES_PYTHON", ROOT / ".venv-libraries" / "bin" / "python"))
_CLIENTS = Path(os.environ.get("SBERT_INFER_CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))
_OF_CLIENTS = ("haystack", "langchain", "llama_index")


def python_for(name: str) -> Path:
    """Return the interpreter that has the library `name`, or skip the test, and say why."""
    if _ALL.exists():
        return _ALL
    if name not in _OF_CLIENTS:
        pytest.skip(f"{_ALL} is missing: run make test-libraries, or set SBERT_INFER_LIBRARIES_PYTHON")
    if not any(_CLIENTS.parents[1].glob("lib/python*/site-packages/onnxruntime")):
        pytest.skip(f"{_CLIENTS} is missing, or has no onnxruntime: run make test, or set SBERT_INFER_CLIENTS_PYTHON")
    return _CLIENTS


def run_library(python: Path, name: str, folder: Path, **given: Path) -> None:
    """Run a script, which ends with an error if something is wrong. Nothing reaches the network."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),  # nothing of the user's own, no cached models
        "PYTHONPATH": str(ROOT),
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
        "SBERT_INFER_CACHE": os.environ["SBERT_INFER_CACHE"],
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "ANONYMIZED_TELEMETRY": "False",  # Chroma
        "DO_NOT_TRACK": "1",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LANGCHAIN_TRACING_V2": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "*",
    }
    command = [str(python), str(SCRIPTS / f"{name}_library.py")]
    own = folder / "files"
    own.mkdir()
    sent = json.dumps({"folder": str(own), **{key: str(path) for key, path in given.items()}})
    done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
