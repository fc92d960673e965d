"""The benchmark of `sbert-embed --reuse`, on a few rows: that it runs, and what it compares."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from sbert_infer.bench.reuse import main


def test_it_compares_both_ways(export_checkpoint: Callable[..., Path]) -> None:
    done = CliRunner().invoke(main, [str(export_checkpoint("bert")), "--rows", "250", "--rounds", "2"])
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"(?m)^(--reuse|from scratch) +[\d.]+ s, [\d,]+ MB", done.output)) == 4
    differences = re.findall(r"outputs differ by (\S+)", done.output)
    assert len(differences) == 2
    assert max(map(float, differences)) < 1e-6
    assert re.search(r"--reuse is [\d.]+ times as fast", done.output)


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("no model", encoding="utf-8")
    done = CliRunner().invoke(main, [str(tmp_path / "model.onnx"), "--rows", "2"])
    assert done.exit_code == 1
    assert done.output == "error: sbert-embed ended with 1\n"  # and before it, in that process, why
