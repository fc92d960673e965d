"""Embeddings for LanceDB: `SbertEmbeddings.create(name="model.onnx")`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.engine import Engine
from sbert_infer.integrations.opening import missing, open_engine

try:
    from lancedb.embeddings import TextEmbeddingFunction, register
    from pydantic import Field
except ImportError as error:
    raise missing(error, "lancedb") from error


@register("sbert-infer")
class SbertEmbeddings(TextEmbeddingFunction):
    """Embeds with what an `Engine` opens, by `name`, and `options`, its keyword options.

    Queries and documents have the model's own prompts. LanceDB writes both down with a table, and
    opens them again. Where it does, this module must be imported.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    max_retries: int = 0  # no network: what fails would fail again

    @property
    def engine(self) -> Engine:
        """The engine, opened when it is first needed."""
        return open_engine(self.name, self.options)

    def ndims(self) -> int:
        """Return the length of a vector."""
        return self.engine.get_embedding_dimension()

    def generate_embeddings(self, texts: Any, *args: Any, **kwargs: Any) -> list[npt.NDArray[np.float32]]:
        """Embed documents."""
        return list(self.engine.encode_document(list(texts)))

    def compute_query_embeddings(self, query: Any, *args: Any, **kwargs: Any) -> list[npt.NDArray[np.float32]]:
        """Embed queries."""
        return list(self.engine.encode_query(list(self.sanitize_input(query))))
