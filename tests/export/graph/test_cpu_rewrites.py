"""What is done to FP32 graphs for CPUs: the same vectors, with and without padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from sbert_infer.export.graph.cpu_rewrites import tune
from tests.export.cases import CASES
from tests.models.checkpoints import LAYERS, TEXTS
from tests.models.graphs import assert_close, nodes, run, tokens

MakeCheckpoint = Callable[..., Path]

ALONE, ALIKE, PADDED = TEXTS[:1], TEXTS[:1] * 3, TEXTS


def test_the_same_vectors(traced: Callable[[], ir.Model], export_checkpoint: MakeCheckpoint) -> None:
    plain, tuned = ir.to_proto(traced()), ir.to_proto(tune(traced()))
    assert len(nodes(plain, "BiasGelu")) == len(nodes(tuned, "Gelu")) == len(nodes(tuned, "Gemm")) == LAYERS
    assert not nodes(tuned, "BiasGelu")
    for texts in (ALONE, ALIKE, PADDED):
        inputs = tokens(export_checkpoint(), texts)
        assert inputs["attention_mask"].all() == (texts is not PADDED)
        assert_close(run(tuned, inputs), run(plain, inputs), 1e-6)


def test_the_mask_counts_where_there_is_padding(
    traced: Callable[[], ir.Model], export_checkpoint: MakeCheckpoint
) -> None:
    """Without the masked branch, padded texts, and only those, get other vectors."""
    tuned = ir.to_proto(tune(traced()))
    unmasked = onnx.ModelProto()
    unmasked.CopyFrom(tuned)
    for node in (node for node in unmasked.graph.node if node.op_type == "If"):
        branches = {attribute.name: attribute.g for attribute in node.attribute}
        (masked,) = branches["else_branch"].node
        masked.input[4] = ""
    alike, padded = (tokens(export_checkpoint(), texts) for texts in (ALIKE, PADDED))
    np.testing.assert_array_equal(run(unmasked, alike), run(tuned, alike))
    differs = np.abs(run(unmasked, padded) - run(tuned, padded)).max(axis=1) > 1e-4
    np.testing.assert_array_equal(differs, ~padded["attention_mask"].all(axis=1))


@pytest.mark.parametrize(("family", "int8"), [("bert", True), ("mpnet", False)])
def test_graphs_that_are_not_unmasked(family: str, int8: bool, export_checkpoint: MakeCheckpoint) -> None:
    """In 8 bits, and with a bias on the scores, attention stays one node with its mask."""
    model = onnx.load(export_checkpoint(family, int8=int8, **CASES[family]))
    assert not [node for node in model.graph.node if node.op_type == "If"]
    assert len(nodes(model, "MultiHeadAttention")) == LAYERS
