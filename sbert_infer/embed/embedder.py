"""`Embedder`: a callable class that adds vectors to batches of rows, for `map_batches` of Ray Data and its like."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import ENCODER
from sbert_infer.backends.devices import Device
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.engine import Engine

__all__ = ["DenseEngine", "Embedder"]

Array = npt.NDArray[Any]


class DenseEngine(Engine):
    """For artifacts that give an array of vectors, which is what a column can hold."""

    _kinds, _name = (ENCODER,), "sbert-embed"


class Embedder:
    """Adds a column of vectors to a batch: an Arrow table, a pandas frame, or a dict of arrays.

    Ray Data makes one in each actor, so the model is opened where it runs:

    >>> ds.map_batches(Embedder, fn_constructor_args=("model.onnx",), batch_size=16384)  # doctest: +SKIP

    Give batches of some thousand rows: texts are sorted by length within a batch.
    """

    def __init__(
        self,
        artifact: str | os.PathLike[str],
        *,
        text_column: str = "text",
        embedding_column: str = "embedding",
        precision: str = "float32",
        normalize: bool = False,
        truncate_dim: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        device: Device = None,
        workers: int | None = None,
    ) -> None:
        """Open `artifact`. `workers` and `device` are those of `Engine`, the rest is as in `sbert-embed`."""
        if precision in ("int8", "uint8"):
            raise ValueError(
                f"precision {precision!r} needs the ranges of the whole corpus: use sbert-embed without Ray"
            )
        self.text_column, self.embedding_column, self.precision = text_column, embedding_column, precision
        self.engine = DenseEngine(artifact, device=device, workers=workers, on_truncate="ignore")
        self._prompt_name, self._prompt, self._normalize, self._truncate_dim = (
            prompt_name,
            prompt,
            normalize,
            truncate_dim,
        )

    def __call__(self, batch: Any) -> Any:
        """The batch with a column more. A row without a text is an error."""
        column = batch[self.text_column]
        texts = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
        vectors = self.encode(texts)
        if hasattr(batch, "append_column"):  # an Arrow table
            from sbert_infer.embed.write.journal import fixed_lists

            return batch.append_column(self.embedding_column, fixed_lists(vectors))
        if hasattr(batch, "assign"):  # a pandas frame
            return batch.assign(**{self.embedding_column: list(vectors)})
        return {**batch, self.embedding_column: vectors}

    def encode(self, texts: Sequence[str]) -> Array:
        """The vectors of `texts`, [texts, dim]."""
        windows = self.engine.encode_windows(
            texts,
            self._prompt_name,
            self._prompt,
            normalize_embeddings=self._normalize,
            truncate_dim=self._truncate_dim,
        )
        dim = min(self._truncate_dim or self.engine.get_embedding_dimension(), self.engine.manifest.dim)
        vectors = np.concatenate([np.empty((0, dim), np.float32), *(window.vectors for window in windows)])
        return reduce_precision(vectors, self.precision)
