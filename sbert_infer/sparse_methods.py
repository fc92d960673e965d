"""The part of `Engine` that is for sparse encoders alone, as `SparseEncoder` has it."""

from __future__ import annotations

from typing import Any

from sbert_infer.artifact.manifest import SPARSE_ENCODER, Manifest
from sbert_infer.base_engine import BaseEngine
from sbert_infer.encode.sparse import check_active_dims, decode, intersection, sparsity


class SparseMethods(BaseEngine):
    """What an engine can do with sparse vectors, besides making them."""

    _max_active_dims: int | None

    def _apply(self, manifest: Manifest) -> None:
        super()._apply(manifest)
        self._max_active_dims = manifest.max_active_dims

    @property
    def max_active_dims(self) -> int | None:
        """How many of the largest values `encode` keeps of a sparse vector; None for all."""
        return self._max_active_dims

    @max_active_dims.setter
    def max_active_dims(self, value: int | None) -> None:
        if self.manifest.kind != SPARSE_ENCODER:
            raise ValueError(f"max_active_dims: not for {self.manifest.name}, whose vectors are dense")
        if value is None and not self._has_words():
            value = self.manifest.max_active_dims  # an autoencoder never keeps all
        self._max_active_dims = check_active_dims(value)

    def decode(self, embeddings: Any, top_k: int | None = None) -> list[Any]:
        """Return the words and weights of each sparse vector, the heaviest first.

        One vector [dim] gives a list of (word, weight); several give a list of such lists.
        """
        if not self._has_words():
            raise ValueError(f"the dimensions of {self.manifest.name} are no words of its vocabulary")
        return decode(embeddings, self.pipeline.tokenizer.backend.id_to_token, top_k)

    @staticmethod
    def sparsity(embeddings: Any) -> dict[str, float]:
        """Return "active_dims", the mean number of values of a vector, and "sparsity_ratio"."""
        return sparsity(embeddings)

    @staticmethod
    def intersection(embeddings_1: Any, embeddings_2: Any) -> Any:
        """Return the products of one sparse vector with one or more others, dimension by dimension.

        Only positive products stay: those of the words that both texts have. The result is like
        the second argument, a sparse tensor or a CSR matrix, and `decode` can read it.
        """
        return intersection(embeddings_1, embeddings_2)

    def _has_words(self) -> bool:
        return self.manifest.kind == SPARSE_ENCODER and self.manifest.pooling[0].startswith(("splade", "presence"))
