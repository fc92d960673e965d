"""Write an artifact: staged beside its target, where it can be verified, then moved into place."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from sbert_infer._util.files import StagedFile, locked, staged
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import DataFile, Manifest
from sbert_infer.artifact.onnx_file import append_metadata, join_routes, sha256
from sbert_infer.errors import ArtifactError, ExportError

# Protobuf's limit is 2 GiB, less room for the graph and the tokenizer (some have 30 MB).
MAX_PROTOBUF_BYTES = 2**31 - 2**27
_LOCK = "lock"  # in a staging folder


@dataclass
class StagedArtifact:
    """A complete artifact at `path`, not yet at its target."""

    path: Path
    tokenizer_json: str
    _graph_bytes: int  # size of the model without the appended metadata
    _file: StagedFile
    _weights: Path | None = None  # of a model over 2 GB
    _data_files: tuple[DataFile, ...] = ()

    def commit(self, manifest: Manifest) -> Manifest:
        """Move the artifact into place with its final `manifest`, returned as written."""
        target = self._file.target
        manifest = replace(manifest, data_files=self._data_files)
        with _blaming(target):
            _write_metadata(self.path, self._graph_bytes, manifest, self.tokenizer_json)
            replaced = _weights_of(target)
            if self._weights is None:
                self._file.commit()
            else:
                shutil.copyfile(self.path, self._file.path)  # small: the weights are in the other file
                self._commit_with(self._weights)
            for name in replaced:
                (target.parent / name).unlink(missing_ok=True)
        return manifest

    def _commit_with(self, weights: Path) -> None:
        placed = self._file.target.parent / weights.name
        try:
            os.link(weights, placed)  # not moved: if this is killed here, the next export knows whose file it is
        except OSError:  # a file system without links
            weights.replace(placed)
        try:
            self._file.commit()
        except BaseException:
            placed.unlink()
            raise


def check_free(target: Path, force: bool) -> None:
    """Raise `ExportError` if `target` exists and may not be replaced."""
    if target.exists() and not force:
        raise ExportError(f"{target} exists: give --force to replace it, or another name with -o")


def check_target(target: Path, force: bool) -> None:
    """Raise `ExportError` if `target` can't or must not be written."""
    if target.is_dir():
        raise ExportError(f"{target} is a folder: name a file")
    check_free(target, force)
    with _blaming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged(target):  # leaves no trace
            pass


@contextmanager
def stage(model: ir.Model, draft: Manifest, tokenizer_json: str, target: Path) -> Iterator[StagedArtifact]:
    """Write `model` as an artifact beside `target`; without `commit` it is removed again."""
    target = Path(os.path.realpath(target))
    with ExitStack() as stack:
        with _blaming(target):
            file = stack.enter_context(staged(target))
            if weight_bytes(model) > MAX_PROTOBUF_BYTES:
                folder = stack.enter_context(staging_folder(target))
                artifact = _write_large(model, draft, tokenizer_json, file, folder)
            else:
                _remove_stale(target)
                artifact = _write(model, draft, tokenizer_json, file)
        yield artifact


def join(parts: Mapping[str, Path], target: Path, force: bool) -> Manifest:
    """Write the artifacts of a model's routes to one file, whose graph is that of the first."""
    target = Path(os.path.realpath(target))
    (main, first), *others = parts.items()
    manifests = [open_artifact(path).manifest for path in parts.values()]
    for name in ("kind", "dim", "similarity", "truncate_dim", "max_active_dims"):
        if len({getattr(manifest, name) for manifest in manifests}) > 1:
            raise ExportError(f"the routes {', '.join(parts)} differ in {name}: export each by itself, with --route")
    size = sum(path.stat().st_size for path in parts.values())
    if size > MAX_PROTOBUF_BYTES or any(manifest.data_files for manifest in manifests):
        raise ExportError("the routes have over 2 GB, too much for one file: export each by itself, with --route")
    check_free(target, force)
    with _blaming(target), staged(target) as staged_file:
        with staged_file.path.open("w+b") as file:
            manifest = join_routes(file, first, main, dict(others))
        replaced = _weights_of(target)
        staged_file.commit()
        for name in replaced:
            (target.parent / name).unlink(missing_ok=True)
    return manifest


def _write(model: ir.Model, draft: Manifest, tokenizer_json: str, file: StagedFile) -> StagedArtifact:
    file.path.write_bytes(ir.to_proto(model).SerializeToString())
    size = file.path.stat().st_size
    _write_metadata(file.path, size, draft, tokenizer_json)
    return StagedArtifact(file.path, tokenizer_json, size, file)


def _write_large(
    model: ir.Model, draft: Manifest, tokenizer_json: str, file: StagedFile, folder: Path
) -> StagedArtifact:
    """Write a model over 2 GB, for which ONNX keeps the weights in a separate file.

    Both are staged in a hidden folder. The weights are put in place first, under a name that no
    other artifact uses, so that renaming the model switches from the old artifact to the new one.
    """
    path, weights = folder / file.target.name, folder / _unused_name(file.target)
    ir.save(model, path, external_data=weights.name)
    size = path.stat().st_size
    data_files = (_data_file(weights),)
    _write_metadata(path, size, replace(draft, data_files=data_files), tokenizer_json)
    return StagedArtifact(path, tokenizer_json, size, file, weights, data_files)


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Create a hidden folder beside `target`, locked for as long as this process lives.

    Folders that killed exports to `target` have left are removed.
    """
    _remove_stale(target)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".staging"))
    try:
        with locked(folder / _LOCK, wait=False):
            yield folder
    finally:  # after the lock: Windows does not remove an open file
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove the folder of a killed export, and the weights of a large model it put in place."""
    for folder in target.parent.glob(f".{glob.escape(target.name)}.*.staging"):
        # Unless it is being written, or another export is removing it.
        with suppress(BlockingIOError, FileNotFoundError):
            with locked(folder / _LOCK, wait=False):
                for weights in folder.glob("*.data"):
                    placed = target.parent / weights.name
                    if placed.exists() and placed.samefile(weights) and placed.name not in _weights_of(target):
                        placed.unlink()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _blaming(target: Path) -> Iterator[None]:
    """Name the file that the user asked for in an error, not the temporary one."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"{target} can't be written: {error.strerror or error}") from error


def _write_metadata(path: Path, graph_bytes: int, manifest: Manifest, tokenizer_json: str) -> None:
    with path.open("r+b") as file:
        file.truncate(graph_bytes)
        append_metadata(file, manifest, tokenizer_json)


def _data_file(path: Path) -> DataFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return DataFile(path.name, path.stat().st_size, sha256(file))


def weight_bytes(model: ir.Model) -> int:
    """Size of the constants of `model`."""
    values = model.graph.initializers.values()
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def _unused_name(target: Path) -> str:
    name, count = f"{target.name}.data", 1
    while (target.parent / name).exists():
        count += 1
        name = f"{target.name}.{count}.data"
    return name


def _weights_of(target: Path) -> list[str]:
    """The weight files of an artifact that is about to be replaced."""
    try:
        return [entry.name for entry in open_artifact(target).manifest.data_files]
    except (OSError, ArtifactError):  # no file, or not ours, so there is nothing of ours to remove
        return []
