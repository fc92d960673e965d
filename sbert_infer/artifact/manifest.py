"""The manifest: what the runtime must know about an artifact beyond its graph and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sbert_infer.errors import ArtifactError, VersionError

FORMAT_VERSION = 1

# Names of a graph's outputs.
SENTENCE, TOKENS, SCORES = "sentence_embedding", "token_embeddings", "scores"
WEIGHTS, MULTI = "token_weights", "multi_vectors"  # bge-m3: [batch, length], [batch, length, dim]
SPARSE = "sparse_embedding"  # of a SPARSE_ENCODER: [batch, dim], mostly zeros

# Kinds of artifacts, each with its description and the class that opens it.
ENCODER, RERANKER, MULTI_VECTOR = "encoder", "reranker", "multi_vector"
SPARSE_ENCODER = "sparse_encoder"
_OPENED_BY = {
    ENCODER: ("a sentence encoder", "Engine"),
    RERANKER: ("a reranker", "Reranker"),
    MULTI_VECTOR: ("a multi-vector encoder", "Engine"),
    SPARSE_ENCODER: ("a sparse encoder", "Engine"),
}

# Keys that were added to the manifest later. Where one is missing, it has its default.
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
    "canaries",
    "route",
    "other_routes",
    "max_positions",
    "tokenizer",
)


@dataclass(frozen=True)
class DataFile:
    """A file of weights beside the model (for models over 2 GB)."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything that the runtime needs to know beyond the graph and the tokenizer."""

    name: str
    architecture: str
    precision: str  # fp32, bf16 or int8; of a plan fp16 or bf16
    dim: int
    max_length: int
    pooling: tuple[str, ...]
    include_prompt: bool  # if False, the graph has an input `prompt_length`, optional but in BF16
    normalized: bool  # whether the graph's vectors have length 1
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
    outputs: tuple[str, ...] = (SENTENCE,)  # names of the graph's outputs
    kind: str = ENCODER  # a RERANKER's graph gives `scores` [batch, dim], one for each of `labels`
    activation: str = "identity"  # applied to a reranker's scores: identity or sigmoid
    labels: tuple[str, ...] = ()
    token_types: bool = False  # whether the graph has an input `token_type_ids`
    max_active_dims: int | None = None  # largest values kept of a sparse vector; None for all
    unweighted_ids: tuple[int, ...] = ()  # with `token_weights`: tokens without a weight
    head: tuple[str, ...] = ()  # with token vectors: modules after pooling, but for a final Normalize
    max_positions: int | None = None  # tokens that `max_length` may be raised to; None for no more
    tokenizer: Mapping[str, Any] | None = None  # of tokenizer_config.json: `input_names`, `special_tokens`
    roles: Mapping[str, Any] | None = None  # MULTI_VECTOR: how to prepare the texts of each role
    canaries: Mapping[str, Any] | None = None  # texts with the eager model's vectors; see `canaries.py`
    route: str | None = None  # of a Router: the task that this graph is for
    other_routes: Mapping[str, Any] | None = None  # other tasks: where in the file their artifacts start and end

    def to_json(self) -> str:
        """Return the manifest as JSON, without later keys that have their default.

        Versions that do not know such a key can then still read it.
        """
        entries = asdict(self)
        for name in _ADDED:
            if getattr(self, name) == getattr(type(self), name):
                del entries[name]
        return json.dumps(entries, ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest. An unknown or missing key raises, as it could change the vectors."""
        entries = dict(json.loads(text))
        found = entries.get("format_version")
        if not isinstance(found, int) or found > FORMAT_VERSION:
            raise VersionError(
                f"artifact format {found}, this sbert-infer reads up to {FORMAT_VERSION}: upgrade sbert-infer"
            )
        entries = {name: getattr(cls, name) for name in _ADDED} | entries
        if odd := set(entries) ^ {known.name for known in fields(cls)}:
            raise ArtifactError(f"manifest keys missing or unknown: {', '.join(sorted(odd))}")
        entries |= {name: tuple(entries[name]) for name in ("pooling", "outputs", "labels", "head", "unweighted_ids")}
        entries["data_files"] = tuple(DataFile(**entry) for entry in entries["data_files"])
        return cls(**entries)


@dataclass(frozen=True)
class Artifact:
    """An open artifact whose bytes have been checked."""

    path: Path
    manifest: Manifest
    tokenizer_json: str
    sha256: str = field(default="", kw_only=True)  # of everything inside; its check needs no second look


def check_kind(artifact: Artifact, kinds: Sequence[str], opener: str) -> None:
    """Raise unless `artifact` is of one of the `kinds` that the class `opener` can open."""
    found = artifact.manifest.kind
    if found not in _OPENED_BY:
        raise ArtifactError(f"{artifact.path} is a {found}, which this sbert-infer does not know: upgrade sbert-infer")
    if found not in kinds:
        what, right = _OPENED_BY[found]
        raise ArtifactError(f"{artifact.path} is {what}: open it with {right}, not with {opener}")


def check_one_route(artifact: Artifact, user: str) -> None:
    """Raise if `artifact` has several routes, of which `user` would take one only."""
    if others := artifact.manifest.other_routes:
        routes = " and ".join([str(artifact.manifest.route), *others])
        fix = "export each by itself, with sbert-export --route"
        raise ArtifactError(f"{artifact.path} has the routes {routes}, and {user} can't choose: {fix}")
