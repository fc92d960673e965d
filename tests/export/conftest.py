"""Fixtures of the export's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from sbert_infer.export import exporter


@pytest.fixture
def traced(export_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[], ir.Model]:
    """Lets exports of the plain small BERT start from its converted graph, since tracing takes seconds."""
    path = export_checkpoint()

    def load() -> ir.Model:
        model = ir.from_proto(onnx.load(path))
        model.metadata_props.clear()
        return model

    monkeypatch.setattr(exporter, "convert", lambda reference, *, portable=False: load())
    return load
