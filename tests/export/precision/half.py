"""An FP16 graph and what it was made of."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from sbert_infer.export.reference.encoder import Reference


@dataclass(frozen=True)
class Half:
    """A reference and its FP16 graph. Shared: do not change it."""

    reference: Reference
    content: bytes

    @property
    def model(self) -> onnx.ModelProto:
        """The graph, parsed."""
        return onnx.load_model_from_string(self.content)
