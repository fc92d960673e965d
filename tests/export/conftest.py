"""Fixtures of the export's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from sbert_infer.export import exporter


@pytest.fixture(scope="session")
def untuned(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of the plain small BERT, fused, but without what is done for FP32 on CPUs."""
    path = tmp_path_factory.mktemp("untuned") / "bert.onnx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "tune", lambda model: model)
        exporter.export(make_checkpoint(), path)
    return path


@pytest.fixture
def traced(untuned: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ir.Model]:
    """Lets exports of the plain small BERT start from its converted graph, since tracing takes seconds."""

    def load() -> ir.Model:
        model = ir.from_proto(onnx.load(untuned))
        model.metadata_props.clear()
        return model

    monkeypatch.setattr(exporter, "convert", lambda reference, **options: load())
    return load
