"""Which artifacts and which checkpoint are measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sbert_infer.bench.contest import models_under_test
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


@pytest.mark.parametrize(
    ("refused", "calls"),
    [
        ({}, ["--fp32 --int8 --bf16"]),
        ({"int8": "too few bits"}, ["--fp32 --int8 --bf16"]),
        ({"int8": "no products", "bf16": "no layers"}, ["--fp32 --int8 --bf16", "--int8", "--bf16"]),
    ],
)
def test_all_precisions_are_exported_in_one_call(
    export_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: dict[str, str],
    calls: list[str],
) -> None:
    """What is refused costs only its own file, and has its own reason."""
    called = []

    def export(source: str, target: Path, flags: list[str]) -> str:
        called.append(" ".join(flags))
        for flag, name in (("--fp32", "model.onnx"), ("--int8", "model.int8.onnx"), ("--bf16", "model.bf16.onnx")):
            if flag in flags and flag[2:] not in refused:
                (tmp_path / name).write_bytes(export_checkpoint("bert").read_bytes())
        return "; ".join(why for precision, why in refused.items() if f"--{precision}" in flags)

    monkeypatch.setattr(models_under_test, "_export", export)
    monkeypatch.setattr(models_under_test, "why_no_bf16", lambda: None)
    models = open_models(["some/model"], None, tmp_path)
    assert called == calls
    assert models.not_exported == refused
    assert len(models.artifacts) == 3 - len(refused)


def test_bf16_is_exported_only_where_it_runs(
    export_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []

    def export(source: str, target: Path, flags: list[str]) -> str:
        assert flags == ["--fp32", "--int8"]
        for name in ("model.onnx", "model.int8.onnx"):
            (tmp_path / name).write_bytes(export_checkpoint("bert").read_bytes())
        return ""

    monkeypatch.setattr(models_under_test, "_export", export)
    monkeypatch.setattr(models_under_test, "why_no_bf16", lambda: "OpenVINO crashes on this CPU (SIGILL)")
    models = open_models(["some/model"], None, tmp_path, announce=announced.append)
    assert models.not_exported == {}
    assert announced[0] == "no BF16: OpenVINO crashes on this CPU (SIGILL)"
