"""Whole corpora: the command `sbert-embed`, and `Embedder` for pipelines of Ray Data."""

from .embedder import Embedder

__all__ = ["Embedder"]
