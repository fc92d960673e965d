"""Which TensorRT is installed, and all that differs between TensorRT 10, 11 and TensorRT for RTX.

Both packages have nearly the same Python API. What this project uses of it is the same in all
three, except:

|                        | TensorRT 10.x      | TensorRT 11.x      | TensorRT-RTX 1.x                              |
|------------------------|--------------------|--------------------|-----------------------------------------------|
| STRONGLY_TYPED         | must be asked for  | always on, ignored | always on, ignored                            |
| GPU an engine is for   | the one at hand    | the one at hand    | any of `ComputeCapability`, none need be there |
| timing cache           | yes                | yes                | deprecated, does nothing                      |
| CUDA graphs            | captured by us     | captured by us     | by itself, once its kernels are specialised   |
| activation memory      | given by us        | given by us        | likewise, if REQUIRE_USER_ALLOCATION was set  |

The first row needs no code (the flag is always given); the others are the fields of `TensorRT`. Not
listed is what was removed in 11 and is not used here: weak typing, implicit batches, calibrators,
`supports_model`, `device_memory_size`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from sbert_infer.errors import EngineError

__all__ = ["TensorRT", "installed", "load"]

logger = logging.getLogger(__name__)

_PACKAGES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx-cu13"}  # module -> what pip calls it
# The first versions with all that is used: activation memory in 64 bits; built-in CUDA graphs.
_OLDEST = {"tensorrt": (10, 8), "tensorrt_rtx": (1, 2)}


@dataclass(frozen=True)
class TensorRT:
    """An installed TensorRT, and how it differs from the others."""

    module: Any
    name: str  # of the module: tensorrt or tensorrt_rtx
    version: str
    any_target: bool  # builds for GPUs that are not there
    timing_cache: bool  # remembers how long kernels took
    own_graphs: bool  # captures CUDA graphs by itself
    user_allocation: bool  # must be told at build time that activation memory will be given

    @property
    def log(self) -> Any:
        """The TensorRT logger of this process, which keeps the last errors: `words()` gives and forgets them."""
        return _make_log(self.module.ILogger)


@functools.cache
def _make_log(base: Any) -> Any:
    """One for all, never freed.

    TensorRT has a single logger, and tells it when an object is made with another. It does so under
    a lock, while Python may switch to a thread that waits for that lock with the GIL held. Two
    threads, each with its logger, hang.
    """

    class Log(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: deque[str] = deque(maxlen=8)

        def log(self, severity: Any, msg: str) -> None:
            if int(severity) <= int(type(self).ERROR):
                self.errors.append(" ".join(msg.split()))
            logger.debug("%s", msg)

        def words(self) -> str:
            found = []
            while self.errors:  # TensorRT's own threads log, too
                found.append(self.errors.popleft())
            return "; ".join(dict.fromkeys(found))

    return Log()


def installed() -> list[TensorRT]:
    """Every TensorRT that can be used, the full one first."""
    return [trt for name in _PACKAGES if (trt := _load_if_there(name)) is not None]


def load(name: str) -> TensorRT:
    """TensorRT by its module's name, `tensorrt` or `tensorrt_rtx`."""
    if name not in _PACKAGES:
        raise ValueError(f"name must be one of {', '.join(_PACKAGES)}, got {name!r}")
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # the latter if one of its libraries is missing
        raise EngineError(f"{name} can't be imported ({error}): pip install {_PACKAGES[name]}") from error
    version = str(module.__version__)
    if _numbers(version) < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        raise EngineError(f"{name} {version} is too old: pip install '{_PACKAGES[name]}>={oldest}'")
    rtx = name == "tensorrt_rtx"
    return TensorRT(module, name, version, any_target=rtx, timing_cache=not rtx, own_graphs=rtx, user_allocation=rtx)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _load_if_there(name: str) -> TensorRT | None:
    try:
        return load(name)
    except EngineError as error:
        logger.debug("%s", error)
        return None
