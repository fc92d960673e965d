"""Fixtures of the export's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.reference.encoder import load_reference
from tests.export.precision.half import Half
from tests.models.exports import use_graphs


@pytest.fixture
def traced(graph_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[], ir.Model]:
    """Let exports of the plain small BERT start from its converted graph, portable or not."""
    use_graphs(monkeypatch, lambda kind: graph_of("bert", kind.replace("portable", "fused")))
    return lambda: ir.from_proto(onnx.load(graph_of("bert")))


@pytest.fixture(scope="session")
def half_of(make_checkpoint: Callable[..., Path], graph_of: Callable[..., Path]) -> Callable[..., Half]:
    """`half_of("bert", pooling=...)`: the reference of a `make_checkpoint`, and its FP16 graph.

    `half_of("bert", "bf16")`: in BF16.
    """

    def get(family: str = "bert", kind: str = "half", **options: Any) -> Half:
        reference = load_reference(read_checkpoint(make_checkpoint(family, **options)))
        return Half(reference, graph_of(family, kind, **options).read_bytes())

    return get
