"""The manifest: what the runtime must know of an artifact beyond its graph and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sbert_infer.errors import ArtifactError, VersionError

__all__ = [
    "ENCODER",
    "FORMAT_VERSION",
    "MULTI",
    "MULTI_VECTOR",
    "RERANKER",
    "SCORES",
    "SENTENCE",
    "SPARSE",
    "SPARSE_ENCODER",
    "TOKENS",
    "WEIGHTS",
    "Artifact",
    "DataFile",
    "Manifest",
    "check_kind",
]

FORMAT_VERSION = 1

SENTENCE, TOKENS, SCORES = "sentence_embedding", "token_embeddings", "scores"  # outputs of a graph
WEIGHTS, MULTI = "token_weights", "multi_vectors"  # of bge-m3: [batch, length], [batch, length, dim]
SPARSE = "sparse_embedding"  # of a SPARSE_ENCODER: [batch, dim] as well, most of it zero

ENCODER, RERANKER, MULTI_VECTOR = "encoder", "reranker", "multi_vector"  # kinds of artifacts, and what opens each
SPARSE_ENCODER = "sparse_encoder"
_OPENED_BY = {
    ENCODER: ("a sentence encoder", "Engine"),
    RERANKER: ("a reranker", "Reranker"),
    MULTI_VECTOR: ("a multi-vector encoder", "Engine"),
    SPARSE_ENCODER: ("a sparse encoder", "Engine"),
}

# Keys of the manifest that the first artifacts do not have: they mean the default.
_ADDED = (
    "outputs",
    "kind",
    "activation",
    "labels",
    "token_types",
    "head",
    "roles",
    "max_active_dims",
    "unweighted_ids",
)


@dataclass(frozen=True)
class DataFile:
    """A file beside the model that holds weights (models over 2 GB)."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that the runtime needs to know beyond the graph and the tokenizer."""

    name: str
    architecture: str
    precision: str  # fp32, int8 or fp16
    dim: int
    max_length: int
    pooling: tuple[str, ...]
    include_prompt: bool  # False: the graph has an optional input `prompt_length`
    normalized: bool  # the graph's vectors have length 1
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    similarity: str
    truncate_dim: int | None
    pad_id: int
    padding_side: str
    truncation_side: str
    weights_sha256: str
    parity: Mapping[str, Any]
    fusion: Mapping[str, int]
    versions: Mapping[str, str]
    data_files: tuple[DataFile, ...] = ()
    format_version: int = FORMAT_VERSION
    outputs: tuple[str, ...] = (SENTENCE,)  # of the graph; there may also be `token_embeddings`
    kind: str = ENCODER  # or RERANKER, whose graph gives `scores` [batch, dim], one for each of its `labels`
    activation: str = "identity"  # what a reranker's scores go through: identity or sigmoid
    labels: tuple[str, ...] = ()
    token_types: bool = False  # the graph has an input `token_type_ids`: 1 for the second text of a pair
    max_active_dims: int | None = None  # how many numbers of a sparse vector stay, the largest; None: all
    unweighted_ids: tuple[int, ...] = ()  # with `token_weights`: tokens that have none
    head: tuple[str, ...] = ()  # with token vectors: modules behind the pooling, other than a Normalize at the end
    roles: Mapping[str, Any] | None = None  # of a MULTI_VECTOR: how the texts of each role are prepared

    def to_json(self) -> str:
        """The manifest as JSON, which older versions can read unless it says something that they do not know."""
        entries = asdict(self)
        for name in _ADDED:
            if getattr(self, name) == getattr(type(self), name):
                del entries[name]
        return json.dumps(entries, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest; an unknown or missing key raises, since dropping one could change the vectors."""
        entries = dict(json.loads(text))
        found = entries.get("format_version")
        if not isinstance(found, int) or found > FORMAT_VERSION:
            raise VersionError(
                f"artifact format {found}, this sbert-infer reads up to {FORMAT_VERSION}: upgrade sbert-infer"
            )
        entries = {name: getattr(cls, name) for name in _ADDED} | entries
        if odd := set(entries) ^ {field.name for field in fields(cls)}:
            raise ArtifactError(f"manifest keys missing or unknown: {', '.join(sorted(odd))}")
        entries |= {name: tuple(entries[name]) for name in ("pooling", "outputs", "labels", "head", "unweighted_ids")}
        entries["data_files"] = tuple(DataFile(**entry) for entry in entries["data_files"])
        return cls(**entries)


@dataclass(frozen=True)
class Artifact:
    """An artifact whose bytes have been checked."""

    path: Path
    manifest: Manifest
    tokenizer_json: str


def check_kind(artifact: Artifact, kinds: Sequence[str], opener: str) -> None:
    """Raise, naming the class that opens it, unless `artifact` is of one of the `kinds` that `opener` opens."""
    found = artifact.manifest.kind
    if found not in _OPENED_BY:
        raise ArtifactError(f"{artifact.path} is a {found}, which this sbert-infer does not know: upgrade sbert-infer")
    if found not in kinds:
        what, right = _OPENED_BY[found]
        raise ArtifactError(f"{artifact.path} is {what}: open it with {right}, not with {opener}")
