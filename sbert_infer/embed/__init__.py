"""Whole corpora: the command `sbert-embed`, and `Embedder` for pipelines of Ray Data."""

from sbert_infer.embed.embedder import Embedder

__all__ = ["Embedder"]
