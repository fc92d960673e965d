"""FP16 graphs of small checkpoints, each made once for all tests."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from sbert_infer.export.checkpoint import read_checkpoint
from sbert_infer.export.half import to_half
from sbert_infer.export.reference import Reference, load_reference

# Options of `make_checkpoint` for the families that are not just as they come.
CASES: dict[str, dict[str, Any]] = {
    "roberta": {"pooling": ("cls",)},
    "xlm-roberta": {"pooling": ("mean", "max", "lasttoken"), "padding_side": "left", "normalize": False},
    "camembert": {"dense": [{"out_features": 16, "use_residual": True}], "layer_norm": True},
    "mpnet": {"layer_pooling": 1},
    "albert": {"pooling": ("mean", "weightedmean"), "include_prompt": False, "prompts": {"query": "Find this: "}},
}


@dataclass(frozen=True)
class Half:
    """A reference and its FP16 graph."""

    reference: Reference
    content: bytes
    before: dict[str, torch.Tensor]  # the reference's weights before the conversion

    @property
    def model(self) -> onnx.ModelProto:
        """The graph, parsed."""
        return onnx.load_model_from_string(self.content)


@functools.cache
def half_of(checkpoint: Path) -> Half:
    """Shared: not to be changed."""
    reference = load_reference(read_checkpoint(checkpoint))
    before = {name: weight.clone() for name, weight in reference.state_dict().items()}
    return Half(reference, ir.to_proto(to_half(reference)).SerializeToString(), before)
