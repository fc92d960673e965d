"""The user's cache: TensorRT engines built here, kernel timings, compiled kernels, and verdicts.

A file is named after everything that its TensorRT engine depends on, and starts with the sha256 of
its content. A process that builds one holds a lock, so that others wait instead of building it too.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sbert_infer._util.cache import CACHE_VARIABLE, cache_folder
from sbert_infer._util.files import locked, staged
from sbert_infer.backends.tensorrt.build import build_engine
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError
from sbert_infer.types import Shape

_HEX = 64  # length of a sha256

logger = logging.getLogger(__name__)


def engine_key(*parts: object) -> str:
    """Return a name for all that an engine depends on: model, runtime, version, GPU, shapes."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def kept(key: str) -> bytes | None:
    """Return the content cached under `key`; None if there is none or it is damaged."""
    return _read(_file(key))


def forget(key: str) -> None:
    """Remove the content cached under `key`."""
    _file(key).unlink(missing_ok=True)


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """Return the content cached under `key`; if there is none or it is damaged, make it."""
    file = _file(key)
    if (content := _read(file)) is not None:
        return content
    with ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(file.with_suffix(".lock")))
        except OSError as error:
            fix = f"set {CACHE_VARIABLE} to a folder that can"
            raise EngineError(f"{file.parent} can't be written ({error.strerror}): {fix}") from error
        if (content := _read(file)) is None:  # another process may just have made it
            content = make()
            _keep(file, content)
        return content


def build(trt: TensorRT, model: bytes, shapes: Sequence[Shape], gpu: str, **options: Any) -> bytes:
    """Call `build_engine` with the kernel timings of earlier builds for the same GPU."""
    timings = cache_folder() / "timings" / f"{engine_key(trt.name, trt.version, gpu)}.timings"
    built = build_engine(trt, model, shapes, timing_cache=_read(timings) or b"", **options)
    if built.timing_cache:
        _keep(timings, built.timing_cache)
    return built.engine


def kept_kernels(key: str) -> bytes | None:
    """Return the compiled kernels kept under `key`; None if there are none or they are damaged."""
    return _read(_kernels(key))


def keep_kernels(key: str, content: bytes) -> None:
    """Keep compiled kernels under `key`, instead of any kept before."""
    _keep(_kernels(key), content)


def kept_verdict(key: str) -> bytes | None:
    """Return what was found out about this machine under `key`; None if nothing was."""
    return _read(_verdict(key))


def keep_verdict(key: str, content: bytes) -> None:
    """Keep what was found out about this machine under `key`, if that is possible."""
    _keep(_verdict(key), content, logging.INFO)


def _verdict(key: str) -> Path:
    return cache_folder() / "verdicts" / f"{key}.verdict"


def _kernels(key: str) -> Path:
    return cache_folder() / "kernels" / f"{key}.kernels"


def _file(key: str) -> Path:
    return cache_folder() / "engines" / f"{key}.engine"


def _read(file: Path) -> bytes | None:
    try:
        kept = file.read_bytes()
    except OSError:  # missing; any other problem will show when the file is written
        return None
    digest, content = kept[:_HEX], kept[_HEX:]
    if hashlib.sha256(content).hexdigest().encode() == digest:
        return content
    logger.warning("%s is damaged and will be made again", file)
    return None


def _keep(file: Path, content: bytes, level: int = logging.WARNING) -> None:
    """Write `content`. If that fails, log it: the content can still be used, but is not cached."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with staged(file) as new:
            new.path.write_bytes(hashlib.sha256(content).hexdigest().encode() + content)
            new.commit()
    except OSError as error:
        logger.log(level, "%s can't be written (%s): it will be made again", file, error.strerror)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock `file`; if another process holds it, log that and wait."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(file, wait=False))
        except BlockingIOError:
            logger.info("waiting for another process that is building the same TensorRT engine")
            stack.enter_context(locked(file))
        yield
