"""Real libraries, unmodified, with a real engine in them.

Most have an environment of their own: see tests/libraries.txt, and `make test-libraries`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sbert_infer.integrations.real_libraries import SCRIPTS, python_for, run_library

NAMES = sorted(path.stem.removesuffix("_library") for path in SCRIPTS.glob("*_library.py"))


@pytest.mark.parametrize("name", NAMES)
def test_library(name: str, minilm_onnx: Path, small_onnx: Path, tmp_path: Path) -> None:
    run_library(python_for(name), name, tmp_path, minilm=minilm_onnx, prompted=small_onnx)
