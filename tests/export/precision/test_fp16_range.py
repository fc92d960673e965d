"""Models that FP16 can't hold are refused, by the name of the layer; others are not touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.precision.fp16_range import MAX_ACTIVATION, refuse_overflow
from sbert_infer.export.reference.encoder import Reference, load_reference
from tests.models.checkpoints import FAMILIES, TEXTS

MakeCheckpoint = Callable[..., Path]


def load(make_checkpoint: MakeCheckpoint, family: str = "bert", **options: Any) -> Reference:
    return load_reference(read_checkpoint(make_checkpoint(family, **options)))


def check_overflow(reference: Reference, texts: Sequence[str]) -> None:
    with refuse_overflow(reference):
        reference.encode(texts)


def parameter(reference: Reference, name: str) -> torch.Tensor:
    return reference.encoder.get_parameter(name).data


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_models_pass_and_are_left_alone(family: str, make_checkpoint: MakeCheckpoint) -> None:
    reference = load(make_checkpoint, family)
    before = reference.encode(TEXTS)
    check_overflow(reference, TEXTS)
    np.testing.assert_array_equal(reference.encode(TEXTS), before)
    assert not any(module._forward_hooks for module in reference.modules())


def test_a_layer_that_overflows_is_named(make_checkpoint: MakeCheckpoint) -> None:
    reference = load(make_checkpoint)
    parameter(reference, "encoder.layer.1.output.dense.bias")[3] = 6e4  # FP16 could hold it, but not much more
    with pytest.raises(ExportError, match=r"the output of encoder\.layer\.1\.output\.dense reaches 6e\+04") as caught:
        check_overflow(reference, TEXTS)
    assert "65504" in str(caught.value)
    assert "--fp16 --bf16" in str(caught.value)
    assert "FP32" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_residual_sum_that_overflows_is_found(make_checkpoint: MakeCheckpoint) -> None:
    """Both branches are within the limit, only their sum is not."""
    reference = load(make_checkpoint)
    parameter(reference, "encoder.layer.0.output.LayerNorm.bias")[3] = 2e4
    parameter(reference, "encoder.layer.1.attention.output.dense.weight")[3] = 0
    parameter(reference, "encoder.layer.1.attention.output.dense.bias")[3] = 2e4
    for layer in ("query", "key", "value"):  # nothing else sees the large number
        parameter(reference, f"encoder.layer.1.attention.self.{layer}.weight")[:, 3] = 0
    with pytest.raises(ExportError, match=r"the input of encoder\.layer\.1\.attention\.output\.LayerNorm reaches 4e"):
        check_overflow(reference, TEXTS)


def test_a_dense_module_that_overflows_is_named(make_checkpoint: MakeCheckpoint) -> None:
    reference = load(make_checkpoint, dense=[{"out_features": 8}])
    weight = reference.head.get_parameter("0.linear.weight").data
    weight.fill_(3e4)
    with pytest.raises(ExportError, match=r"the output of head\.0\.linear reaches"):
        check_overflow(reference, TEXTS)
    weight.fill_(1e5)
    with pytest.raises(ExportError, match=r"the weights head\.0\.linear\.weight reach 1e\+05"):
        check_overflow(reference, TEXTS)


@pytest.mark.parametrize(("share", "refused"), [(0.98, False), (1.02, True)])
def test_the_limit(share: float, refused: bool, make_checkpoint: MakeCheckpoint) -> None:
    reference = load(make_checkpoint)
    for end in ("weight", "bias"):
        parameter(reference, f"encoder.layer.1.output.LayerNorm.{end}").zero_()
    parameter(reference, "encoder.layer.1.output.LayerNorm.bias")[0] = -share * MAX_ACTIVATION
    if not refused:
        check_overflow(reference, TEXTS)
        return
    with pytest.raises(ExportError, match=r"encoder\.layer\.1\.output\.LayerNorm"):
        check_overflow(reference, TEXTS)


def test_rare_texts_count(make_checkpoint: MakeCheckpoint) -> None:
    reference = load(make_checkpoint)
    rare = reference.tokenizer("漢", add_special_tokens=False)["input_ids"][0]
    parameter(reference, "embeddings.word_embeddings.weight")[rare, 0] = 5e4
    check_overflow(reference, TEXTS[:3])
    with pytest.raises(ExportError, match=r"the output of embeddings\.word_embeddings"):
        check_overflow(reference, [*TEXTS[:3], "漢"])


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_weights_out_of_range_are_named(scale: float, make_checkpoint: MakeCheckpoint) -> None:
    reference = load(make_checkpoint)
    parameter(reference, "encoder.layer.0.intermediate.dense.weight").mul_(scale)
    with pytest.raises(ExportError, match=r"the weights encoder\.layer\.0\.intermediate\.dense\.weight"):
        check_overflow(reference, TEXTS)


def test_masks_do_not_count(make_checkpoint: MakeCheckpoint) -> None:
    """Some attention implementations mark padding with the lowest FP32 number."""
    reference = load_reference(read_checkpoint(make_checkpoint("mpnet")), attention="eager")
    check_overflow(reference, ["a", *TEXTS])


def test_an_error_inside_goes_through(make_checkpoint: MakeCheckpoint) -> None:
    reference = load(make_checkpoint)
    with pytest.raises(KeyboardInterrupt), refuse_overflow(reference):
        raise KeyboardInterrupt
    assert not any(module._forward_hooks for module in reference.modules())
