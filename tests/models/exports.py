"""An export in two steps, so that tests can share the first: tracing takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch

from sbert_infer.export import exporter
from sbert_infer.export import plan_exporter as plan_export
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.exporter import ExportOptions
from sbert_infer.export.families import sentence
from sbert_infer.export.graph.trace import convert
from sbert_infer.export.precision.fp16 import to_half
from sbert_infer.export.reference.encoder import load_reference


def write_graph(checkpoint: Path, kind: str, target: Path) -> None:
    """Convert `checkpoint` to a graph (fused, portable, half, bf16, cuda), and write it."""
    reference = load_reference(read_checkpoint(checkpoint))
    if kind in ("half", "bf16"):
        model = to_half(reference, torch.float16 if kind == "half" else torch.bfloat16)
    elif kind == "cuda":
        model = convert(reference, token_output=True, cuda=True)
    else:
        model = convert(reference, portable=kind == "portable")
    target.write_bytes(ir.to_proto(model).SerializeToString())


def use_graphs(patch: pytest.MonkeyPatch, graph: Callable[[str], Path]) -> None:
    """Let exports read `graph(kind)`, a file of `write_graph`, instead of converting."""

    def load(kind: str) -> ir.Model:
        return ir.from_proto(onnx.load(graph(kind)))

    def converted(*_: object, portable: bool = False, **__: object) -> ir.Model:
        return load("portable" if portable else "fused")

    patch.setattr(sentence, "convert", converted)
    patch.setattr(plan_export, "to_half", lambda _, dtype: load("half" if dtype == torch.float16 else "bf16"))
    patch.setattr(plan_export, "convert", lambda *_, **__: load("cuda"))


def export_graph(checkpoint: Path, target: Path, options: ExportOptions, graph: Callable[[str], Path]) -> None:
    """Export `checkpoint` to `target`, from `graph`."""
    with pytest.MonkeyPatch.context() as patch:
        use_graphs(patch, graph)
        exporter.export(str(checkpoint), target, options)
