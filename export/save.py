"""Putting an artifact on disk: staged beside its target, where it can be verified, and moved into place in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from sbert_infer.artifact import DataFile, Manifest, append_metadata, open_artifact, sha256
from sbert_infer.errors import ArtifactError
from sbert_infer.files import StagedFile, staged

__all__ = ["MAX_PROTOBUF_BYTES", "StagedArtifact", "stage"]

MAX_PROTOBUF_BYTES = 2**31 - 2**24  # protobuf's limit is 2 GiB; some room for tokenizer, manifest and graph


@dataclass
class StagedArtifact:
    """A whole artifact at `path`, not yet at its target."""

    path: Path
    tokenizer_json: str
    _graph_bytes: int  # size of the model without what was appended
    _file: StagedFile
    _data: Path | None = None  # the weights of a model over 2 GB

    def commit(self, manifest: Manifest) -> Manifest:
        """Put the artifact in place with its final `manifest`, which is returned as written."""
        if self._data is not None:
            manifest = replace(manifest, data_files=(_data_file(self._data),))
        _write_metadata(self.path, self._graph_bytes, manifest, self.tokenizer_json)
        replaced = _data_files(self._file.target)
        if self._data is not None:
            self._data.replace(self._file.target.parent / self._data.name)
            shutil.copyfile(self.path, self._file.path)  # small: the weights are in the other file
        self._file.commit()
        for name in replaced:
            (self._file.target.parent / name).unlink(missing_ok=True)
        return manifest


@contextmanager
def stage(model: ir.Model, draft: Manifest, tokenizer_json: str, target: Path) -> Iterator[StagedArtifact]:
    """Write `model` as an artifact beside `target`. Leaving without `commit` removes every trace of it."""
    if _weight_bytes(model) > MAX_PROTOBUF_BYTES:
        with _stage_large(model, draft, tokenizer_json, target) as artifact:
            yield artifact
        return
    with staged(target) as file:
        file.path.write_bytes(ir.to_proto(model).SerializeToString())
        size = file.path.stat().st_size
        _write_metadata(file.path, size, draft, tokenizer_json)
        yield StagedArtifact(file.path, tokenizer_json, size, file)


@contextmanager
def _stage_large(model: ir.Model, draft: Manifest, tokenizer_json: str, target: Path) -> Iterator[StagedArtifact]:
    """Over 2 GB, ONNX keeps the weights in a file beside the model.

    Both are staged in a hidden folder. The weights move first, under a name that no other artifact uses, so that the
    one rename of the model switches from old to new. What a killed export leaves, the next one removes.
    """
    for stale in target.parent.glob(f".{target.name}.*.staging"):
        if not _alive(stale.name.split(".")[-2]):
            shutil.rmtree(stale)
    folder = target.parent / f".{target.name}.{os.getpid()}.staging"
    folder.mkdir()
    try:
        path, data = folder / target.name, folder / _unused_name(target)
        ir.save(model, path, external_data=data.name)
        size = path.stat().st_size
        _write_metadata(path, size, replace(draft, data_files=(_data_file(data),)), tokenizer_json)
        with staged(target) as file:
            yield StagedArtifact(path, tokenizer_json, size, file, data)
    finally:
        shutil.rmtree(folder)


def _write_metadata(path: Path, graph_bytes: int, manifest: Manifest, tokenizer_json: str) -> None:
    with path.open("r+b") as file:
        file.truncate(graph_bytes)
        append_metadata(file, manifest, tokenizer_json)


def _data_file(path: Path) -> DataFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return DataFile(path.name, path.stat().st_size, sha256(file))


def _weight_bytes(model: ir.Model) -> int:
    values = model.graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def _unused_name(target: Path) -> str:
    name, count = f"{target.name}.data", 1
    while (target.parent / name).exists():
        count += 1
        name = f"{target.name}.{count}.data"
    return name


def _data_files(target: Path) -> list[str]:
    """The weight files of an artifact that is about to be replaced."""
    try:
        return [entry.name for entry in open_artifact(target).manifest.data_files]
    except (OSError, ArtifactError):  # nothing there, or not ours: then nothing of ours to remove
        return []


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        pass
    return True
