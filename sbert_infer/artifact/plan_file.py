"""The plan: an uncompressed zip with the model in 16 bits and TensorRT engines built from it.

    manifest.json      the model, the TensorRT engines, and size and sha256 of every other member
    tokenizer.json
    model.onnx         FP16 or BF16 weights, standard operators, packed rows: for TensorRT
    cuda.onnx          the graph for onnxruntime on a GPU, with the weights of model.onnx; FP16 only
    cpu.onnx           the graph for CPUs, with the same weights, widened on opening
    engines/...        TensorRT engines, if any, named by runtime, version and GPU

The zip's comment holds the sha256 of manifest.json, so every member is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from sbert_infer.artifact.manifest import Artifact, Manifest
from sbert_infer.errors import ArtifactError, CorruptError, VersionError
from sbert_infer.types import Shape

PLAN_VERSION = 2  # 1 had padded batches instead of packed rows
MAGIC = b"PK\x03\x04"
MANIFEST, TOKENIZER, MODEL = "manifest.json", "tokenizer.json", "model.onnx"
CPU_GRAPH, CUDA_GRAPH = "cpu.onnx", "cuda.onnx"

_DAWN_OF_ZIP = (1980, 1, 1, 0, 0, 0)  # date of every member, so that the same content gives the same bytes


@dataclass(frozen=True)
class EngineFile:
    """A TensorRT engine inside a plan. It runs only on this TensorRT and this kind of GPU."""

    runtime: str  # tensorrt or tensorrt_rtx
    version: str
    target: str  # compute capability, such as sm89
    gpu: str = ""  # model of GPU that it was tuned on, such as NVIDIA L4; empty for TensorRT-RTX

    @property
    def name(self) -> str:
        """The name of the member that holds this engine."""
        gpu = "".join(f"-{word}" for word in re.findall(r"[A-Za-z0-9]+", self.gpu))
        return f"engines/{self.runtime}-{self.version}-{self.target}{gpu}.engine"

    def describe(self) -> str:
        """Return a short description."""
        return f"{self.runtime} {self.version} for {self.gpu or self.target}"


@dataclass(frozen=True)
class PackedRowsModel:
    """What must be known to run the model, which takes packed rows."""

    inputs: tuple[str, ...]  # names of the model's inputs
    hidden: int  # the model's width
    shapes: tuple[Shape, ...]  # of every TensorRT engine, in the plan or built later


@dataclass(frozen=True)
class Plan(Artifact):
    """An open plan. Its members are checked when they are read."""

    engines: tuple[EngineFile, ...]
    rows: PackedRowsModel
    pooling: str  # what its TensorRT engines leave to do: nothing, "graph", or pooling by a "kernel"
    members: Mapping[str, tuple[int, str]]  # name -> size, sha256

    def read(self, name: str) -> bytes:
        """Return the bytes of a member after checking its size and hash."""
        size, digest = self.members[name]
        with _archive(self.path) as archive:
            content = archive.read(name)
            if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
                raise CorruptError(f"the bytes of {name} have changed since it was written; export or copy it again")
        return content


def is_plan(path: Path) -> bool:
    """Return whether the file starts like a plan."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def write_plan(
    file: BinaryIO,
    manifest: Manifest,
    tokenizer_json: str,
    *,
    model: bytes,
    cpu_graph: bytes,
    cuda_graph: bytes | None,
    engines: Mapping[EngineFile, bytes],
    rows: PackedRowsModel,
    pooling: str,
) -> None:
    """Write a plan to an open, empty file."""
    members = {TOKENIZER: tokenizer_json.encode(), MODEL: model, CPU_GRAPH: cpu_graph}
    if cuda_graph is not None:
        members[CUDA_GRAPH] = cuda_graph
    members |= {engine.name: content for engine, content in engines.items()}
    head = {
        "plan_version": PLAN_VERSION,
        "model": json.loads(manifest.to_json()),
        "engines": [asdict(engine) for engine in engines],
        "rows": asdict(rows) | {"shapes": [shape._asdict() for shape in rows.shapes]},
        "pooling": pooling,
        "members": {name: [len(content), hashlib.sha256(content).hexdigest()] for name, content in members.items()},
    }
    first = json.dumps(head, ensure_ascii=False, indent=1, sort_keys=True).encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in {MANIFEST: first, **members}.items():
            archive.writestr(zipfile.ZipInfo(name, _DAWN_OF_ZIP), content)
        archive.comment = hashlib.sha256(first).hexdigest().encode()


def open_plan(path: Path) -> Plan:
    """Check and read the plan's manifest and tokenizer. Other members are checked when used."""
    with _archive(path) as archive:
        plan = _parse(path, _head(archive), archive.comment.decode())
        if odd := set(archive.namelist()) ^ {MANIFEST, *plan.members}:
            raise CorruptError(f"members missing or unknown: {', '.join(sorted(odd))}")
    return replace(plan, tokenizer_json=plan.read(TOKENIZER).decode())


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the zip at `path`; errors raised within this context name the file."""
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive
        except ArtifactError as error:
            raise type(error)(f"{path}: {error}") from error.__cause__
        except Exception as error:  # zipfile and its decompressors may raise anything on damaged files
            raise CorruptError(f"{path}: damaged ({error}); export or copy it again") from error


def _head(archive: zipfile.ZipFile) -> dict[str, Any]:
    content = archive.read(MANIFEST) if MANIFEST in archive.namelist() else b""
    if b'"plan_version"' not in content:
        raise ArtifactError("a zip, but not a plan of sbert-infer; make one with `sbert-export CHECKPOINT --fp16`")
    if hashlib.sha256(content).hexdigest().encode() != archive.comment:
        raise CorruptError("damaged (its manifest does not have the recorded sha256); export or copy it again")
    head = dict(json.loads(content))
    found = head.get("plan_version")
    if not isinstance(found, int) or found > PLAN_VERSION:
        raise VersionError(f"plan format {found}, this sbert-infer reads {PLAN_VERSION}: upgrade sbert-infer")
    if found < PLAN_VERSION:
        fix = "export it again with `sbert-export CHECKPOINT --fp16`"
        raise VersionError(f"plan format {found}, of an older sbert-infer; this one reads {PLAN_VERSION}: {fix}")
    return head


def _parse(path: Path, head: Mapping[str, Any], digest: str) -> Plan:
    known = {"plan_version", "model", "engines", "rows", "pooling", "members"}
    if odd := set(head) ^ known:
        raise ArtifactError(f"manifest keys missing or unknown: {', '.join(sorted(odd))}")
    return Plan(
        path,
        Manifest.from_json(json.dumps(head["model"])),
        tokenizer_json="",  # filled in by `open_plan`
        engines=tuple(EngineFile(**entry) for entry in head["engines"]),
        rows=_parse_rows(head["rows"]),
        pooling=str(head["pooling"]),
        members={name: (int(size), str(hashed)) for name, (size, hashed) in head["members"].items()},
        sha256=digest,
    )


def _parse_rows(entry: Mapping[str, Any]) -> PackedRowsModel:
    shapes = tuple(Shape(**shape) for shape in entry["shapes"])
    return PackedRowsModel(**{**entry, "inputs": tuple(entry["inputs"]), "shapes": shapes})
