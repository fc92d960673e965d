"""The artifact: one ONNX file that also carries its manifest and tokenizer. The contract between export and runtime.

    graph bytes | tokenizer entry | manifest entry | seal entry
                ^ offset                           ^ sha256 of everything before

Each entry is an ONNX metadata property; protobuf messages concatenate, so the file stays an
ordinary model. The seal has a fixed size, so all of it is read from the end, and checked, before
any parser or native library sees the file.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from sbert_infer.artifact.protobuf import bytes_field, external_locations
from sbert_infer.artifact.protobuf import fields as protobuf_fields
from sbert_infer.errors import ArtifactError, CorruptError, VersionError

__all__ = [
    "ENCODER",
    "FORMAT_VERSION",
    "MULTI",
    "MULTI_VECTOR",
    "PRODUCER",
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
    "append_metadata",
    "check_kind",
    "open_artifact",
    "sha256",
]

FORMAT_VERSION = 1
PRODUCER = "sbert-infer"  # the model's producer_name, near the file's start: tells a torn artifact from a foreign file

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
_METADATA_PROPS = 14  # ModelProto's field number
_TOKENIZER, _MANIFEST, _SEAL = "sbert_infer.tokenizer", "sbert_infer.manifest", "sbert_infer.seal"


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


def append_metadata(file: BinaryIO, manifest: Manifest, tokenizer_json: str) -> None:
    """Turn a file that holds just an ONNX model into an artifact. `file` is open for reading and writing."""
    offset = file.seek(0, 2)
    file.write(_entries(tokenizer_json, manifest.to_json()))
    file.flush()
    file.seek(0)
    digest = sha256(file)
    file.seek(0, 2)
    file.write(_seal(digest, offset))
    file.flush()


def sha256(file: BinaryIO) -> str:
    """The hash of the rest of an open file."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Check the artifact at `path`, an ONNX model or a plan, and read its manifest and tokenizer."""
    from sbert_infer.artifact.plan_file import is_plan, open_plan  # which builds on this file

    path = Path(path)
    if path.is_dir():
        raise ArtifactError(f"{path} is a folder, not an artifact: run `sbert-export {path}` first")
    if is_plan(path):
        return open_plan(path)
    with path.open("rb") as file:
        try:
            # Unmapped with its last view: an error's traceback still holds some, so closing it here
            # would fail.
            return _read(path, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except (ValueError, KeyError, TypeError) as error:  # empty file; malformed protobuf, JSON, UTF-8 or manifest
            raise CorruptError(f"{path}: not a readable artifact ({error})") from error
        except ArtifactError as error:
            raise type(error)(f"{path}: {error}") from error.__cause__


def _read(path: Path, data: memoryview) -> Artifact:
    body, offset, digest = _unseal(data)
    if hashlib.sha256(body).hexdigest() != digest:
        raise CorruptError("its bytes have changed since it was written (sha256 differs); export or copy it again")
    entries = dict(_parse_entry(content) for _, content in protobuf_fields(body[offset:]))
    manifest = Manifest.from_json(entries[_MANIFEST])
    # Nothing else may stand there: a parser would merge it into the graph. This checks the offset,
    # too.
    if body[offset:] != _entries(entries[_TOKENIZER], entries[_MANIFEST]):
        raise CorruptError("its end is damaged; export or copy it again")
    _check_data_files(path, manifest, external_locations(body[:offset]))
    return Artifact(path, manifest, entries[_TOKENIZER])


def _unseal(data: memoryview) -> tuple[memoryview, int, str]:
    """Split off the seal: what it covers, where the appended entries begin, and the hash it holds."""
    size = len(_seal("0" * 64, 0))
    body, seal = data[: max(0, len(data) - size)], bytes(data[max(0, len(data) - size) :])
    digest, _, offset = seal[-81:].decode("ascii", "replace").partition("@")
    if offset.isascii() and offset.isdigit() and _seal(digest, int(offset)) == seal and int(offset) <= len(body):
        return body, int(offset), digest
    if PRODUCER.encode() in bytes(data[:64]):
        raise CorruptError("its end is missing or damaged; export or copy it again")
    raise ArtifactError("not an artifact of sbert-infer; make one with `sbert-export CHECKPOINT`")


def _check_data_files(path: Path, manifest: Manifest, locations: set[str]) -> None:
    expected = {entry.name for entry in manifest.data_files}
    for name in sorted(locations | expected):
        if Path(name).name != name or name in ("", ".", ".."):
            raise ArtifactError(f"refers to weights outside its folder: {name!r}")
    if locations != expected:
        raise ArtifactError(f"its weights are in {sorted(locations)}, but its manifest lists {sorted(expected)}")
    for entry in manifest.data_files:
        file = path.parent / entry.name
        if not file.is_file():
            raise ArtifactError(f"its weights file {entry.name} is missing; keep it in the same folder")
        if file.stat().st_size != entry.size:
            raise CorruptError(f"{entry.name} has {file.stat().st_size} bytes, {entry.size} were written")
        with file.open("rb") as handle:
            if sha256(handle) != entry.sha256:
                raise CorruptError(f"the bytes of {entry.name} have changed since it was written (sha256 differs)")


def _entries(tokenizer_json: str, manifest_json: str) -> bytes:
    return _entry(_TOKENIZER, tokenizer_json) + _entry(_MANIFEST, manifest_json)


def _entry(key: str, value: str) -> bytes:
    return bytes_field(_METADATA_PROPS, bytes_field(1, key.encode()) + bytes_field(2, value.encode()))


def _parse_entry(content: memoryview) -> tuple[str, str]:
    entry = {number: bytes(value).decode() for number, value in protobuf_fields(content)}
    return entry[1], entry[2]


def _seal(digest: str, offset: int) -> bytes:
    return _entry(_SEAL, f"{digest}@{offset:016d}")
