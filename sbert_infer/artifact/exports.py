"""The cache of exports: from the name of a checkpoint, a folder or a model of the hub, to vectors.

    ~/.cache/sbert-infer/exports/
      local/my-model/                          exports of folders
      sentence-transformers--all-MiniLM-L6-v2/
        c9745ed1d9f207416be6-0.1.0.fp32.onnx   commit, or hash of a folder's files, and our version
        c9745ed1d9f207416be6-0.1.0.int8.onnx

A checkpoint that is not there yet is exported, by one process while others wait for it. Finding one
that is there needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePath

from sbert_infer._util.cache import CACHE_VARIABLE, cache_folder
from sbert_infer._util.files import locked
from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.hub import HubModel
from sbert_infer.artifact.manifest import Artifact
from sbert_infer.artifact.onnx_file import sha256
from sbert_infer.errors import ArtifactError, EngineError, ExportError

MODEL_PRECISIONS = ("fp32", "int8", "bf16", "fp16")
_ARTIFACTS = (".onnx", ".plan")
_MISSING = "No such file or folder: give a file of sbert-export, a checkpoint's folder, or a model of the hub"
# Files that an export may read: settings, tokenizers, weights, code.
_READ = {".json", ".txt", ".model", ".safetensors", ".bin", ".pt", ".metadata", ".py"}
# Folders with other exports of the same model, and earlier states of its training.
_NOT_READ = re.compile(r"onnx$|openvino$|checkpoint-|\.")
_ADAPTER = "adapter_config.json"

logger = logging.getLogger(__name__)


def open_model(
    source: str | os.PathLike[str] | Artifact, *, revision: str | None = None, model_precision: str | None = None
) -> Artifact:
    """Open an artifact, or the export of a checkpoint, which is made if the cache has none.

    A `source` that is no file is a checkpoint: a folder, or the name of a model of the hub. The
    `revision` (of the hub) and the `model_precision` ("fp32" by default, "int8", "bf16" or "fp16")
    are only for checkpoints.
    """
    if model_precision not in (None, *MODEL_PRECISIONS):
        raise ValueError(f"model_precision must be one of {', '.join(MODEL_PRECISIONS)}, got {model_precision!r}")
    if not isinstance(source, Artifact):
        is_path, source = isinstance(source, PurePath), os.fspath(source)
        if Path(source).is_dir() if is_path else is_checkpoint(source):  # a Path is no name on the hub
            return _open_export(source, revision, model_precision or "fp32")
    for name, value in (("revision", revision), ("model_precision", model_precision)):
        if value is not None:
            path = source.path if isinstance(source, Artifact) else source
            raise ValueError(f"{name} is for a checkpoint, but {path} is a file that was already exported")
    if isinstance(source, Artifact):
        return source
    try:
        return open_artifact(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, _MISSING, source) from None


def is_checkpoint(source: str) -> bool:
    """Whether this is a folder, or can be the name of a model of the hub."""
    path = Path(source)
    if path.exists() or path.suffix in _ARTIFACTS:
        return path.is_dir()
    return HubModel.parse(source) is not None


def _open_export(source: str, revision: str | None, precision: str) -> Artifact:
    if Path(source).is_dir():
        if revision is not None:
            raise ValueError(f"revision is for models of the hub, but {source} is a folder")
        folder = cache_folder() / "exports" / "local" / Path(source).resolve().name
        file = _file(folder, _content(Path(source)), precision)
        return _read(file) or _make(source, file, precision)
    model = HubModel.parse(source)
    assert model is not None  # noqa: S101  # see is_checkpoint
    model = model if revision is None else replace(model, revision=revision)
    try:
        commit = model.commit or _commit(model)
    except Exception as error:  # see HubModel
        if model.revision is None and (artifact := _newest(model, precision)) is not None:
            return artifact
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        what = "neither a file or folder here nor a model that could be fetched from the hub"
        raise ArtifactError(f"{source}: {what} ({reason})") from error
    file = _file(_folder(model), commit, precision)
    return _read(file) or _make(f"{model.repository}@{commit}", file, precision)


def _commit(model: HubModel) -> str:
    """Return the commit that the hub says; if it can't be asked, that of the last download."""
    try:
        return str(model.info().sha)
    except Exception as error:  # see HubModel; HF_HUB_OFFLINE is one of the reasons
        try:
            return model.downloaded().name
        except Exception:
            raise error from None  # says more than that nothing was downloaded


def _content(folder: Path) -> str:
    """Return a hash of the files of a checkpoint that an export may read."""
    files = list(_files_to_read(folder))
    for name, file in tuple(files):
        if file.name == _ADAPTER and (base := _base_of(file)) is not None:
            files += ((f"{name}: {there}", of_base) for there, of_base in _files_to_read(base))
    digest = hashlib.sha256()
    for name, file in files:
        with file.open("rb") as content:
            digest.update(f"{name}\n{sha256(content)}\n".encode())
    return digest.hexdigest()


def _files_to_read(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder that an export may read, each with its name there."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if file.suffix in _READ and file.is_file() and not _NOT_READ.match(name.parts[0]):
            yield name.as_posix(), file


def _base_of(adapter: Path) -> Path | None:
    """Return the folder of the model whose weights an adapter changes; None for one on the hub."""
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        return Path(base) if base and Path(base).is_dir() else None
    except (ValueError, KeyError, TypeError):  # the export will say what is wrong
        return None


def _file(folder: Path, version: str, precision: str) -> Path:
    """Return where in `folder` the export of this version of a checkpoint is, or will be."""
    ours = importlib.import_module(__name__.partition(".")[0]).__version__
    suffix = "plan" if precision == "fp16" else "onnx"
    return folder / f"{version[:20]}-{ours}.{precision}.{suffix}"


def _folder(model: HubModel) -> Path:
    return cache_folder() / "exports" / model.repository.replace("/", "--")


def _newest(model: HubModel, precision: str) -> Artifact | None:
    """Open the export of this model that was made last, whatever its commit."""
    files = sorted(_folder(model).glob(f"*.{precision}.*[nx]"), key=lambda file: file.stat().st_mtime)
    artifact = next((artifact for file in reversed(files) if (artifact := _read(file)) is not None), None)
    if artifact is not None:
        logger.warning("the hub can't be asked for %s: its last export is used, %s", model.repository, artifact.path)
    return artifact


def _read(file: Path) -> Artifact | None:
    """Open an export; None if there is none, or if it can't be read and must be made again."""
    try:
        return open_artifact(file)
    except OSError:  # none there; any other problem will show when it is written
        return None
    except ArtifactError as error:
        logger.warning("%s: it will be exported again", error)
        return None


def _make(source: str, file: Path, precision: str) -> Artifact:
    """Export `source` to `file`, unless another process has just done so."""
    with ExitStack() as stack:
        lock = file.with_name(file.name + ".lock")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            logger.warning("waiting for another process that is exporting %s", source)
            stack.enter_context(locked(lock))
        except OSError as error:
            fix = f"set {CACHE_VARIABLE} to a folder that can"
            raise EngineError(f"{file.parent} can't be written ({error.strerror}): {fix}") from error
        if (artifact := _read(file)) is None:
            _export(source, file, precision)
            artifact = open_artifact(file)
        return artifact


def _export(source: str, file: Path, precision: str) -> None:
    """Export a checkpoint. This is the one place where the runtime calls the export."""
    try:
        exporter = importlib.import_module("sbert_infer.export.exporter")
    except ImportError as error:
        fix = "pip install 'sbert-infer[export]', or open a file that sbert-export wrote elsewhere"
        raise ExportError(f"{source} must be exported first, and {error.name} is not installed: {fix}") from error
    options = {} if precision == "fp32" else {precision: True}
    logger.warning("exporting %s (%s), once, to %s", source, precision, file)
    exporter.export(source, file, exporter.ExportOptions(force=True, **options))
