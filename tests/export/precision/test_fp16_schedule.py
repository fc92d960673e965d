"""What the real TensorRT-RTX makes of the packed graph of each family, for GPUs that are not here.

Attention must be one kernel on each target: a softmax kernel would mean that scores of every pair
of tokens go through the GPU's memory. Kernels are counted, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.backends.tensorrt.build import build_engine
from sbert_infer.backends.tensorrt.versions import load
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.precision.fp16 import to_half
from sbert_infer.export.reference.encoder import load_reference
from sbert_infer.types import Shape
from tests.models.engine_schedule import Schedule, read_schedules
from tests.models.families import FAMILIES, LAYERS, NEWER

pytest.importorskip("tensorrt_rtx")

TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120")
SHAPES = (Shape(1, 64, 16), Shape(8, 64, 16))
# The most launches of a pass on any target, as found; a pass that needs more has lost a fusion.
LAUNCHES = {
    "bert": 27,
    "roberta": 29,
    "distilbert": 27,
    "mpnet": 29,
    "albert": 28,
    "electra": 28,
    "modernbert": 29,
    "t5": 36,
    "deberta-v2": 33,
    "nomic_bert": 29,
    "gte": 28,
    "qwen2": 28,
    "qwen3": 34,
    "gemma3_text": 33,
}
# Heads of 16 columns: TensorRT has no fused attention for those of 8. These have them by default.
WIDE_HEADS = {"t5", "qwen3", "gemma3_text"}
SAME_AS_ROBERTA = {"xlm-roberta", "camembert"}


def options(family: str) -> dict[str, Any]:
    return {} if family in WIDE_HEADS else {"config": {"num_attention_heads": 2}}


def schedules(model: bytes, target: str, **options: Any) -> list[Schedule]:
    found = read_schedules(build_engine(load("tensorrt_rtx"), model, SHAPES, target=target, **options).engine)
    assert len(found) == len(SHAPES)
    return found


def test_every_family_is_here() -> None:
    assert set(LAUNCHES) | SAME_AS_ROBERTA == {*FAMILIES, *NEWER}


@pytest.mark.parametrize("family", LAUNCHES)
def test_attention_is_fused_for_every_target(family: str, graph_of: Callable[..., Path]) -> None:
    model = graph_of(family, "half", **options(family)).read_bytes()
    for target in TARGETS:
        found = schedules(model, target)
        assert [each.fused_attentions for each in found] == [LAYERS] * len(SHAPES), target
        assert [each.softmaxes for each in found] == [0] * len(SHAPES), target
        assert all(each.capturable for each in found), target
        assert max(each.launches for each in found) <= LAUNCHES[family], target


@pytest.mark.parametrize("target", ["sm75", "sm120"])
def test_token_vectors_need_no_pooling(target: str, graph_of: Callable[..., Path]) -> None:
    model = graph_of("bert", "half", **options("bert")).read_bytes()
    pooled, tokens = (schedules(model, target, output=output) for output in (SENTENCE, TOKENS))
    for one, other in zip(pooled, tokens, strict=True):
        assert other.fused_attentions == LAYERS
        assert other.launches < one.launches


def test_bf16(make_checkpoint: Callable[..., Path]) -> None:
    reference = load_reference(read_checkpoint(make_checkpoint("t5")))
    model = ir.to_proto(to_half(reference, torch.bfloat16)).SerializeToString()
    for target in TARGETS[1:]:
        for found in schedules(model, target, precision="bf16"):
            assert (found.fused_attentions, found.softmaxes, found.capturable) == (LAYERS, 0, True)


def test_the_real_minilm(minilm_path: Path) -> None:
    """Two shapes of a plan, for one target."""
    model = ir.to_proto(to_half(load_reference(read_checkpoint(minilm_path)))).SerializeToString()
    shapes = [Shape(1, 512, 128), Shape(128, 128, 32)]
    built = build_engine(load("tensorrt_rtx"), model, shapes, target="sm89").engine
    for found in read_schedules(built):
        assert (found.fused_attentions, found.softmaxes, found.capturable) == (6, 0, True)
        assert found.launches <= 67


# --------------------------------------------------------------------------------------------------
# The reader


def test_attention_that_is_not_fused_is_seen(graph_of: Callable[..., Path]) -> None:
    for found in schedules(graph_of("bert", "half").read_bytes(), "sm89"):  # heads of 8 columns
        assert (found.fused_attentions, found.softmaxes) == (0, LAYERS)
        assert found.launches > LAUNCHES["bert"]


def test_an_engine_without_a_schedule() -> None:
    with pytest.raises(ValueError, match="no schedule was found in the engine"):
        read_schedules(b"an engine of another version" * 100)
