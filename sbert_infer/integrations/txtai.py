"""Vectors for txtai: `Embeddings(path="model.onnx", method=METHOD)`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sbert_infer.engine import Engine
from sbert_infer.integrations.opening import missing, open_engine

try:
    from txtai.vectors import Vectors
except ImportError as error:
    raise missing(error, "txtai") from error

METHOD = f"{__name__}.SbertVectors"  # txtai's setting `method`


class SbertVectors(Vectors):
    """Embeds with what an `Engine` opens: txtai's settings `path` and `vectors`, its options.

    Queries and documents have the model's own prompts. An index that is saved opens it again.
    """

    def loadmodel(self, path: str) -> Engine:
        """Open the model."""
        return open_engine(path, self.config.get("vectors", {}))

    def encode(self, data: list[str], category: str | None = None) -> npt.NDArray[np.float32]:
        """Embed queries, documents ("data"), or other texts."""
        engine: Engine = self.model
        encode = {"query": engine.encode_query, "data": engine.encode_document}.get(category or "", engine.encode)
        vectors: npt.NDArray[np.float32] = encode(data)
        return vectors
