"""Which artifacts and which checkpoint are measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sbert_infer.bench.contest.models_under_test import open_models
from sbert_infer.bench.errors import BenchError


def test_an_artifact_without_its_checkpoint_says_what_to_add(
    export_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match="add --checkpoint"):
        open_models([str(export_checkpoint("bert"))], None, tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", "model.int8.onnx"])
def test_the_checkpoint_beside_the_artifact_is_found(
    export_checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(export_checkpoint("bert").read_bytes())
    (tmp_path / "model").mkdir()
    assert open_models([str(tmp_path / name)], None, tmp_path).checkpoint == str(tmp_path / "model")


def test_artifacts_of_two_checkpoints_are_refused(export_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    sources = [str(export_checkpoint("bert")), str(export_checkpoint("distilbert"))]
    with pytest.raises(BenchError, match="different checkpoints"):
        open_models(sources, None, tmp_path)


def test_a_missing_file_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"nothing\.onnx does not exist"):
        open_models([str(tmp_path / "nothing.onnx")], None, tmp_path)
