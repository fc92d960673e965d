"""Input files: globs, folders, standard input; their formats, and how to tell if one changed."""

from __future__ import annotations

import glob
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.fs as pafs

from sbert_infer.errors import EmbedError

STDIN = "-"
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_BUFFER = 1 << 20  # bytes


@dataclass(frozen=True)
class Source:
    """One file, or standard input."""

    path: str
    format: str
    size: int = 0
    modified_ns: int = 0

    def open(self) -> BinaryIO:
        """Open the file, decompressing if its name says that it is compressed."""
        if self.path == STDIN:
            # Not sys.stdin.buffer: the interpreter can't exit while a thread waits in it.
            return open(sys.stdin.fileno(), "rb", buffering=_BUFFER, closefd=False)
        filesystem, path = resolve(self.path)
        stream = filesystem.open_input_stream(path, compression=_compression(path), buffer_size=_BUFFER)
        return cast(BinaryIO, io.BufferedReader(stream, _BUFFER))

    def fraction(self, read_bytes: int) -> float:
        """The fraction of the file that `read_bytes` are; NaN if unknown."""
        if self.path == STDIN or not self.size or _compression(self.path):
            return float("nan")
        return min(1.0, read_bytes / self.size)


def resolve(path: str) -> tuple[pafs.FileSystem, str]:
    """Find the file system of a path or URI, and the path in it, by pyarrow or else by fsspec."""
    if "://" not in path:
        return pafs.LocalFileSystem(), str(Path(path).absolute())
    try:
        filesystem, inside = pafs.FileSystem.from_uri(path)
    except pa.ArrowInvalid as error:
        try:
            import fsspec

            handler, inside = fsspec.core.url_to_fs(path)
        except (ImportError, ValueError):
            raise EmbedError(f"{path}: {first_line(error)}") from error
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(handler))
    return filesystem, inside


def find_sources(inputs: Sequence[str], input_format: str | None) -> list[Source]:
    """Find the files of `inputs`, in that order; those of a glob or folder are sorted by name."""
    paths = [path for name in inputs for path in _expand(name, input_format)]
    if STDIN in paths and len(paths) > 1:
        raise EmbedError("- (standard input) can't be combined with files: give one or the other")
    return [_source(path, input_format) for path in paths]


def _expand(name: str, input_format: str | None) -> list[str]:
    if name == STDIN:
        return [name]
    if "://" not in name and glob.has_magic(name) and not Path(name).exists():
        found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())  # noqa: PTH207
    else:
        filesystem, path = resolve(name)
        info = filesystem.get_file_info(path)
        if info.type == pafs.FileType.File:
            return [name]
        found = _in_folder(filesystem, path, name) if info.type == pafs.FileType.Directory else []
        found = found if input_format else [path for path in found if format_of(path) is not None]
    if not found:
        raise EmbedError(f"{name}: no such file, and no glob or folder with files that can be read")
    return found


def _in_folder(filesystem: pafs.FileSystem, folder: str, name: str) -> list[str]:
    """List the files below a folder, except hidden ones and those that a job leaves there."""
    entries = filesystem.get_file_info(pafs.FileSelector(folder, recursive=True))
    files = [entry.path.removeprefix(folder).lstrip("/") for entry in entries if entry.type == pafs.FileType.File]
    shown = [
        path
        for path in files
        if not any(part.startswith((".", "_")) or part.endswith(".parts") for part in path.split("/"))
        and not path.endswith(".errors.jsonl")
    ]
    return [f"{name.rstrip('/')}/{path}" for path in sorted(shown)]


def _source(path: str, input_format: str | None) -> Source:
    found = input_format or ("text" if path == STDIN else format_of(path))
    if found is None:
        names = "|".join(dict.fromkeys(FORMATS.values()))
        raise EmbedError(f"{path}: its name does not say what it holds: use --input-format {names}")
    if path == STDIN:
        if found == "parquet":
            raise EmbedError("Parquet can't be read from standard input: give the file's name")
        return Source(path, found)
    filesystem, inside = resolve(path)
    info = filesystem.get_file_info(inside)
    return Source(path, found, info.size or 0, info.mtime_ns or 0)


def first_line(error: BaseException) -> str:
    """The message of a library's error, without its stack."""
    return str(error).strip().split("\n")[0][:200]


def format_of(path: str) -> str | None:
    """Return the format that the name of a file says; None if it says none."""
    suffixes = Path(path).suffixes
    if suffixes and _compression(path):
        suffixes.pop()
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


def _compression(path: str) -> str | None:
    return _COMPRESSED.get(Path(path).suffix)
