"""An embedding function for Chroma: `SbertEmbeddingFunction("model.onnx")`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.engine import Engine
from sbert_infer.integrations.opening import missing, open_engine

try:
    from chromadb.api.types import EmbeddingFunction
    from chromadb.utils.embedding_functions import register_embedding_function
except ImportError as error:
    raise missing(error, "chromadb") from error

_SPACES = {"cosine": "cosine", "dot": "ip", "euclidean": "l2"}


@register_embedding_function
class SbertEmbeddingFunction(EmbeddingFunction):
    """Embeds with what an `Engine` opens, and its keyword options.

    Queries and documents have the model's own prompts, and collections the model's similarity.
    Chroma writes path and options down with a collection, and opens them again. Where it does, this
    module must be imported.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._path, self._options = os.fspath(model), options

    @property
    def engine(self) -> Engine:
        """The engine, opened when it is first needed."""
        return open_engine(self._path, self._options)

    def __call__(self, input: list[str]) -> list[npt.NDArray[np.float32]]:  # Chroma checks the argument's name
        """Embed documents."""
        return list(self.engine.encode_document(input))

    def embed_query(self, input: list[str]) -> list[npt.NDArray[np.float32]]:
        """Embed queries."""
        return list(self.engine.encode_query(input))

    def default_space(self) -> str:
        """Return Chroma's name of the model's similarity."""
        name = self.engine.similarity_fn_name
        if name not in _SPACES:
            raise ValueError(f"Chroma has no {name} distance: choose a space for the collection")
        return _SPACES[name]

    @staticmethod
    def name() -> str:
        """Return the name under which Chroma finds this class."""
        return "sbert_infer"

    def get_config(self) -> dict[str, Any]:
        """Write the path and the options down."""
        return {"model": self._path, "options": self._options}

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> SbertEmbeddingFunction:
        """Make the function of what `get_config` returned."""
        return SbertEmbeddingFunction(config["model"], **config["options"])
