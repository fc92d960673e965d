"""A backend for KeyBERT: `KeyBERT(embedding_model=SbertEmbedder("model.onnx"))`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.integrations.opening import Model, missing, open_engine

try:
    from keybert.backend import BaseEmbedder
except ImportError as error:
    raise missing(error, "keybert") from error


class SbertEmbedder(BaseEmbedder):
    """Embeds with an `Engine`, or with what one opens, and its keyword options.

    Without it, KeyBERT takes an `Engine` for no model at all, and loads one of its own.
    """

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__(embedding_model=open_engine(model, options))

    def embed(self, documents: list[str], verbose: bool = False) -> npt.NDArray[np.float32]:
        """Embed documents or words, with the model's default prompt if it has one."""
        vectors: npt.NDArray[np.float32] = self.embedding_model.encode(documents, show_progress_bar=verbose)
        return vectors
