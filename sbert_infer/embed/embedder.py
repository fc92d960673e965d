"""`Embedder`, which adds vectors to batches of rows, and what it shares with `sbert-embed`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.exports import open_model
from sbert_infer.artifact.manifest import ENCODER, Artifact, check_kind, check_one_route
from sbert_infer.backends.devices import Device
from sbert_infer.encode.output import Window
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.encode.self_check import Verify
from sbert_infer.engine import Engine

Array = npt.NDArray[Any]


def open_engine(model: str | os.PathLike[str] | Artifact, **options: Any) -> Engine:
    """Open a model whose vectors are dense, since a column can hold no others."""
    artifact = open_model(model)
    check_kind(artifact, (ENCODER,), "sbert-embed")
    check_one_route(artifact, "sbert-embed")
    return Engine(artifact, on_truncate="ignore", **options)


@dataclass(frozen=True)
class Vectors:
    """Which vectors of the model to write."""

    precision: str = "float32"
    normalize: bool = False
    truncate_dim: int | None = None
    prompt_name: str | None = None
    prompt: str | None = None

    def dim(self, engine: Engine) -> int:
        """The length of a vector before its precision is reduced."""
        return min(self.truncate_dim or engine.get_embedding_dimension(), engine.manifest.dim)

    def windows(
        self, engine: Engine, texts: Iterable[str], progress: Callable[[int], object] = lambda count: None
    ) -> Iterator[Window]:
        """Encode `texts` window by window, in float32."""
        return engine.encode_windows(
            texts,
            self.prompt_name,
            self.prompt,
            normalize_embeddings=self.normalize,
            truncate_dim=self.truncate_dim,
            progress=progress,
        )


class Embedder:
    """Adds a column of vectors to a batch: an Arrow table, a pandas frame, or a dict of arrays.

    Ray Data makes one in each actor, so the model is opened where it runs:

    >>> model = ("model.onnx",)
    >>> ds.map_batches(Embedder, fn_constructor_args=model, batch_size=16384)  # doctest: +SKIP

    Give it batches of some thousand rows: texts are sorted by length within a batch. Arrow tables
    say in their metadata from what their vectors were made, as `sbert-embed`'s files do.
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
        verify: Verify = "once",
    ) -> None:
        """Open `artifact`. The last three are `Engine`'s, the rest is `sbert-embed`'s."""
        if precision in ("int8", "uint8"):
            raise ValueError(
                f"precision {precision!r} needs the ranges of the whole corpus: use sbert-embed without Ray"
            )
        self.text_column, self.embedding_column, self.precision = text_column, embedding_column, precision
        self.engine = open_engine(artifact, device=device, workers=workers, verify=verify)
        self._vectors = Vectors(precision, normalize, truncate_dim, prompt_name, prompt)

    def __call__(self, batch: Any) -> Any:
        """The batch with one more column. A row without a text is an error."""
        column = batch[self.text_column]
        texts = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
        vectors = self.encode(texts)
        if hasattr(batch, "append_column"):  # an Arrow table
            return self._append(batch, vectors)
        if hasattr(batch, "assign"):  # a pandas frame
            return batch.assign(**{self.embedding_column: list(vectors)})
        return {**batch, self.embedding_column: vectors}

    def _append(self, table: Any, vectors: Array) -> Any:
        """Return an Arrow table with a column of vectors, and from what these were made."""
        from sbert_infer.embed.write.origin import ORIGIN, Origin
        from sbert_infer.embed.write.vectors import fixed_lists

        made = self._vectors
        prompt, dim = self.engine.resolve_prompt(made.prompt, made.prompt_name), made.dim(self.engine)
        columns = self.text_column, self.embedding_column
        origin = Origin(self.engine.fingerprint, prompt, dim, made.normalize, self.precision, *columns)
        longer = table.append_column(self.embedding_column, fixed_lists(vectors))
        return longer.replace_schema_metadata({**(table.schema.metadata or {}), ORIGIN: origin.to_json()})

    def encode(self, texts: Sequence[str]) -> Array:
        """The vectors of `texts`, [texts, dim]."""
        empty = np.empty((0, self._vectors.dim(self.engine)), np.float32)
        windows = self._vectors.windows(self.engine, texts)
        return reduce_precision(np.concatenate([empty, *(window.vectors for window in windows)]), self.precision)
