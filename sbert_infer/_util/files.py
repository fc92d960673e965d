"""Files that appear whole or not at all, and locks that end with their process.

A crash, a full disk or `kill -9` during a write leaves either the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout


@dataclass
class StagedFile:
    """A file being written beside `target`; `path` opens it until `commit` puts it in place."""

    target: Path
    path: Path
    _fd: int

    def commit(self) -> None:
        """Flush to disk and take the target's place in one step."""
        os.fsync(self._fd)
        if self.path.parent != self.target.parent:  # unnamed until now
            self.path = _link(self._fd, self.target)
        self.path.replace(self.target)
        _sync_folder(self.target.parent)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path`. If another holder has it, wait, or raise `BlockingIOError`.

    The file is created if need be, and never removed. The system releases the lock when the process
    ends, however it ends, so a file left behind locks nothing.
    """
    lock = FileLock(path)
    try:
        lock.acquire(blocking=wait)
    except Timeout as error:
        raise BlockingIOError(errno.EWOULDBLOCK, "held by another process", str(path)) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staged(target: Path) -> Iterator[StagedFile]:
    """Stage a new `target`. Leaving without `commit` removes every trace.

    Where the system can, the staged file has no name, so not even a killed process leaves one
    behind.
    """
    target = Path(os.path.realpath(target))
    fd, path = _create(target)
    file = StagedFile(target, path, fd)
    try:
        yield file
    finally:
        if file.path.parent == target.parent:
            file.path.unlink(missing_ok=True)
        os.close(fd)


def _create(target: Path) -> tuple[int, Path]:
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # a file system without unnamed files
            fd = os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
            return fd, Path(f"/proc/self/fd/{fd}")
    path = target.parent / _temporary_name(target)
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), path


def _link(fd: int, target: Path) -> Path:
    """Give an unnamed file a temporary name: a link can't replace a file, a rename can."""
    name = _temporary_name(target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        # The folder descriptors make Python follow the /proc link to the file itself.
        os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return target.parent / name


def _temporary_name(target: Path) -> str:
    return f".{target.name}.{secrets.token_hex(8)}.tmp"


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    with contextlib.suppress(OSError):  # not every system opens folders
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
