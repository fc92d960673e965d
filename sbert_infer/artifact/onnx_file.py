"""The ONNX artifact: one ONNX file that also holds its manifest and tokenizer.

    graph bytes | other routes | tokenizer entry | manifest entry | seal entry
                               ^ offset                           ^ sha256 of everything before

Each entry is an ONNX metadata property. Protobuf messages can be concatenated, so the file remains
an ordinary ONNX model. The seal has a fixed size, so everything can be read from the end of the
file and checked before any parser or native library sees it.

The graphs of a model's other routes, if any, are whole artifacts in fields that ONNX does not know
and skips; the manifest says where they are.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from sbert_infer.artifact.manifest import Artifact, Manifest
from sbert_infer.artifact.protobuf import bytes_field, external_locations
from sbert_infer.artifact.protobuf import fields as protobuf_fields
from sbert_infer.errors import ArtifactError, CorruptError

# The model's producer_name, near the start of the file: tells a damaged artifact from another file.
PRODUCER = "sbert-infer"
# How other files begin that may be mistaken for an artifact.
_OTHERS = (
    (rb"version https://git-lfs", "a pointer of Git LFS whose content was not fetched"),
    (rb'.{8}\{\s*"', "weights in the format safetensors"),
    (rb"\x80[\x02-\x05]", "a Python pickle"),
    (rb"PAR1", "a Parquet file"),
    (rb"\x93NUMPY", "a NumPy array"),
    (rb"\s*<(!doctype|html|\?xml)", "a web page"),
    (rb"\s*[\[{]", "JSON"),
    (rb"[\t\n\r\x20-\x7e]{40}", "a text"),
    (rb"\x08[\x03-\x20][\x12:]", "an ONNX model of another program"),
)
_PRODUCER_NAME, _METADATA_PROPS = 2, 14  # ModelProto's field numbers
_ROUTE = 9001  # a field number that ModelProto does not have
_TOKENIZER, _MANIFEST, _SEAL = "sbert_infer.tokenizer", "sbert_infer.manifest", "sbert_infer.seal"


@dataclass(frozen=True)
class Part(Artifact):
    """An artifact inside a file: one of a model's routes."""

    start: int
    stop: int

    def read(self) -> bytes:
        """Return its bytes, an ONNX model."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


def append_metadata(file: BinaryIO, manifest: Manifest, tokenizer_json: str) -> None:
    """Turn a plain ONNX model into an artifact. `file` must be open for reading and writing."""
    offset = file.seek(0, 2)
    file.write(_entries(tokenizer_json, manifest.to_json()))
    file.flush()
    file.seek(0)
    digest = sha256(file)
    file.seek(0, 2)
    file.write(_seal(digest, offset))
    file.flush()


def sha256(file: BinaryIO) -> str:
    """Return the hash of an open file, from its current position to its end."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def join_routes(file: BinaryIO, main: Path, route: str, others: Mapping[str, Path]) -> Manifest:
    """Write the artifact `main`, which is for the task `route`, with `others` inside, to `file`."""
    artifact, places = open_onnx_file(main), {}
    weights = [artifact.manifest.weights_sha256]
    with main.open("rb") as source:
        graph = _unseal(memoryview(source.read()))
        file.write(graph[0][: graph[1]])
    for name, path in others.items():
        field = bytes_field(_ROUTE, path.read_bytes())
        stop = file.tell() + len(field)
        places[name] = [stop - path.stat().st_size, stop]
        file.write(field)
        weights.append(open_onnx_file(path).manifest.weights_sha256)
    digest = hashlib.sha256("".join(weights).encode()).hexdigest()
    manifest = replace(artifact.manifest, weights_sha256=digest, route=route, other_routes=places)
    append_metadata(file, manifest, artifact.tokenizer_json)
    return manifest


def open_routes(artifact: Artifact) -> dict[str, Part]:
    """Return the other routes in the file of an open `artifact`, by their tasks."""
    places = artifact.manifest.other_routes
    if not places:
        return {}
    with artifact.path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    found = {}
    for name, (start, stop) in places.items():
        part = _read(artifact.path, data[start:stop])
        found[name] = Part(artifact.path, part.manifest, part.tokenizer_json, start, stop, sha256=part.sha256)
    return found


def open_onnx_file(path: Path) -> Artifact:
    """Check the ONNX artifact at `path`, and read its manifest and tokenizer."""
    with path.open("rb") as file:
        try:
            # Not closed here: that would fail while the traceback of an error holds a view of it.
            # The file is unmapped when its last view is gone.
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
    # A parser would merge any further fields into the graph, so there must be none. This also
    # checks the offset.
    if body[offset:] != _entries(entries[_TOKENIZER], entries[_MANIFEST]):
        raise CorruptError("its end is damaged; export or copy it again")
    _check_data_files(path, manifest, external_locations(body[:offset]))
    return Artifact(path, manifest, entries[_TOKENIZER], sha256=digest)


def _unseal(data: memoryview) -> tuple[memoryview, int, str]:
    """Split off the seal; return the bytes before it, the offset of the entries, and the hash."""
    size = len(_seal("0" * 64, 0))
    body, seal = data[: max(0, len(data) - size)], bytes(data[max(0, len(data) - size) :])
    digest, _, offset = seal[-81:].decode("ascii", "replace").partition("@")
    if offset.isascii() and offset.isdigit() and _seal(digest, int(offset)) == seal and int(offset) <= len(body):
        return body, int(offset), digest
    if bytes_field(_PRODUCER_NAME, PRODUCER.encode()) in bytes(data[:64]):  # no text has it like that
        raise CorruptError("its end is missing or damaged; export or copy it again")
    what = f"{_describe(bytes(data[:64]))}not an artifact of sbert-infer"
    raise ArtifactError(f"{what}; make one with `sbert-export CHECKPOINT`")


def _describe(head: bytes) -> str:
    """Say what another file is by its first bytes, with a comma; "" if that is unknown."""
    found = (what for beginning, what in _OTHERS if re.match(beginning, head, re.DOTALL | re.IGNORECASE))
    return next((f"{what}, " for what in found), "")


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
