"""Memory and time over many shapes, on a few of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from sbert_infer._util.cores import usable_cores
from sbert_infer.bench.shapes import main


@pytest.mark.parametrize(("options", "workers"), [((), usable_cores()), (("--workers", "3"), 3)])
def test_a_few_batches(options: tuple[str, ...], workers: int, export_checkpoint: Callable[..., Path]) -> None:
    done = CliRunner().invoke(main, [str(export_checkpoint()), "--batches", "10", *options], catch_exceptions=False)
    first, *lines = done.output.splitlines()
    assert f"on CPU, {workers} workers" in first
    assert re.search(r"\d shapes: \d+ MB", first)
    assert [line.split()[0] for line in lines] == ["2", "4", "6", "8", "10"]


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("no model", encoding="utf-8")
    done = CliRunner().invoke(main, [str(tmp_path / "model.onnx")])
    assert done.exit_code == 1
    assert re.fullmatch(r"error: .*model\.onnx: .*not an artifact.*\n", done.output)
