"""The tokenizer and the pipeline of an artifact."""

from __future__ import annotations

from sbert_infer.artifact.manifest import RERANKER, Artifact
from sbert_infer.backends.base import Backend
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.errors import ArtifactError
from sbert_infer.text.pair_tokenizer import PairTokenizer
from sbert_infer.text.tokenizer import Tokenizer


def load_tokenizer(artifact: Artifact, max_length: int | None = None, side: str | None = None) -> Tokenizer:
    """Load the tokenizer, with the artifact's own limit and truncation side unless given others."""
    manifest = artifact.manifest
    max_length, side = max_length or manifest.max_length, side or manifest.truncation_side
    try:
        if manifest.kind == RERANKER:
            return PairTokenizer(artifact.tokenizer_json, max_length, side, token_types=manifest.token_types)
        return Tokenizer(artifact.tokenizer_json, max_length, side)
    except Exception as error:  # tokenizers raises nothing more precise
        raise ArtifactError(f"{artifact.path}: the installed tokenizers can't read its tokenizer: {error}") from error


def make_pipeline(artifact: Artifact, tokenizer: Tokenizer, backend: Backend) -> Pipeline:
    """Return a pipeline that runs the texts, or the pairs of a reranker, on `backend`."""
    manifest = artifact.manifest
    return Pipeline(
        tokenizer,
        backend,
        pad_id=manifest.pad_id,
        padding_side=manifest.padding_side,
        pairs=manifest.kind == RERANKER,
    )
