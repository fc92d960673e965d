"""Embeddings for chonkie: `SemanticChunker(embedding_model=SbertEmbeddings("model.onnx"))`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.integrations.opening import Model, missing, open_engine

try:
    from chonkie.embeddings import BaseEmbeddings
except ImportError as error:
    raise missing(error, "chonkie") from error


class SbertEmbeddings(BaseEmbeddings):
    """Embeds with an `Engine`, or with what one opens, and its keyword options."""

    def __init__(self, model: Model, **options: Any) -> None:
        super().__init__()
        self.engine = open_engine(model, options)

    def embed(self, text: str) -> npt.NDArray[np.float32]:
        """Embed a text."""
        vector: npt.NDArray[np.float32] = self.engine.encode(text)
        return vector

    def embed_batch(self, texts: list[str]) -> list[npt.NDArray[np.float32]]:
        """Embed texts."""
        return list(self.engine.encode(texts))

    def similarity(self, u: npt.NDArray[np.float32], v: npt.NDArray[np.float32]) -> np.float32:
        """Return the similarity of two vectors, by the model's own function."""
        score: np.float32 = np.float32(self.engine.similarity(u, v).item())
        return score

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return self.engine.get_embedding_dimension()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, which counts the tokens of chunks and cuts no text."""
        return self.engine.tokenizer.backend_tokenizer
