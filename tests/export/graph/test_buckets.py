"""Buckets of relative positions are looked up, and are those that transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from sentence_transformers import SentenceTransformer

from sbert_infer.artifact import open_artifact
from sbert_infer.backends.openvino_install import why_no_bf16
from sbert_infer.export.exporter import ExportOptions, export
from tests.models.graphs import nodes

FAMILIES = {"mpnet": {}, "t5": {}, "deberta-v2": {"position_buckets": 32, "max_relative_positions": 160}}
LIMIT = 160  # tokens: beyond the distance of 128 from which on all are in one bucket


@pytest.mark.parametrize("family", FAMILIES)
def test_no_graph_has_a_logarithm(family: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Its certificate compares texts up to the limit with the eager model, which computes one."""
    checkpoint = make_checkpoint(family, max_length=LIMIT, config=FAMILIES[family])
    for portable in (True, False):
        path = tmp_path / f"{portable}.onnx"
        manifest = export(checkpoint, path, ExportOptions(portable=portable))
        assert not nodes(onnx.load(path), "Log")
        assert manifest.parity["max_length"] == LIMIT
        assert manifest.parity["min_cosine"] > 0.99999


@pytest.mark.skipif(why_no_bf16() is not None, reason=f"{why_no_bf16()}")
def test_bf16_does_not_move_a_distance_to_another_bucket(copy_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """With a bias that counts, as in a trained model."""
    checkpoint = copy_checkpoint("mpnet", max_length=LIMIT)
    model = SentenceTransformer(str(checkpoint), device="cpu")
    with torch.no_grad():
        model[0].auto_model.encoder.relative_attention_bias.weight *= 10
    model.save(str(checkpoint), create_model_card=False)
    path = tmp_path / "model.bf16.onnx"
    export(checkpoint, path, ExportOptions(bf16=True))
    assert open_artifact(path).manifest.parity["min_cosine"] > 0.9995
