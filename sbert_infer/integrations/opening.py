"""What the classes for other libraries share: how they open a model, and how they write it down."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Union

from sbert_infer.artifact.manifest import ENCODER
from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError

Model = Union[Engine, str, "os.PathLike[str]"]


def open_engine(model: Model, options: Mapping[str, Any]) -> Engine:
    """Return `model` if it is an engine; otherwise open it with these keyword options of `Engine`.

    The same files and options are opened once in a process: several libraries open a model again
    for each copy of an object, or for each search. Files that were replaced are opened anew.
    """
    if isinstance(model, Engine):
        if options:
            raise TypeError(f"{', '.join(options)}: an option of opening, but the engine given is open already")
        engine = model
    else:
        path = os.fspath(model)
        key = path, json.dumps(dict(options), sort_keys=True), _state(Path(path))
        engine = _opened(*key)
        if engine.is_closed:  # by someone who had it from here
            _opened.cache_clear()
            engine = _opened(*key)
    if engine.manifest.kind != ENCODER:
        raise EngineError(f"{engine.manifest.name} is a {engine.manifest.kind}, not a model of one vector per text")
    return engine


@lru_cache(maxsize=4)
def _opened(path: str, options: str, state: tuple[object, ...]) -> Engine:
    return Engine(path, **json.loads(options))


def _state(path: Path) -> tuple[object, ...]:
    """Return what is different once a file, or one of a folder, is another; () for a name."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    stats = [(file, file.stat()) for file in files]
    return tuple((file.absolute(), stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def written_down(model: Model) -> str:
    """Return the name or path of a model, for a configuration that opens it again elsewhere."""
    if isinstance(model, Engine):
        raise EngineError("an open Engine can't be written to a configuration: give its path and options instead")
    return os.fspath(model)


def missing(error: ImportError, package: str) -> ImportError:
    """Make the error of a library that is not installed."""
    name = (error.name or package).partition(".")[0]
    return ImportError(f"{name} is not installed: pip install {package}", name=name)
