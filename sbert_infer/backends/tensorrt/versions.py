"""The installed TensorRT, and the differences between TensorRT 10, 11 and TensorRT for RTX.

The packages have nearly the same Python API. The part that this project uses is the same in all
three, except:

|                   | TensorRT 10.x   | TensorRT 11.x   | TensorRT-RTX 1.x                         |
|-------------------|-----------------|-----------------|------------------------------------------|
| STRONGLY_TYPED    | must be set     | always on       | always on                                |
| target GPU        | this machine's  | this machine's  | any `ComputeCapability`, here or not     |
| timing cache      | yes             | yes             | deprecated, does nothing                 |
| CUDA graphs       | captured by us  | captured by us  | captured by itself, after specialisation |
| activation memory | allocated by us | allocated by us | same, if REQUIRE_USER_ALLOCATION was set |

The first row needs no code (the flag is always set, and ignored where it is always on); the others
are fields of `TensorRT`. Not listed are features that were removed in 11 and are not used here:
weak typing, implicit batches, calibrators, `supports_model`, `device_memory_size`.

Calls fail in different ways, the same in all three (read in the sources of TensorRT 10.8 to 11.1's
bindings; those of TensorRT-RTX are not public, but have the same signatures). The reason is in the
log.

| call                                                    | on failure                           |
|---------------------------------------------------------|--------------------------------------|
| `Builder`, `Runtime`, `OnnxParser`                      | raises TypeError, for a null pointer |
| `Builder.create_network`                                | returns None                         |
| `Builder.create_builder_config`                         | returns None                         |
| `Builder.create_optimization_profile`                   | returns None                         |
| `Builder.build_serialized_network`                      | returns None                         |
| `OnnxParser.parse`                                      | returns False                        |
| `INetworkDefinition.unmark_output`                      | returns None, as if it had worked    |
| `IOptimizationProfile.set_shape`                        | raises RuntimeError                  |
| `IBuilderConfig.add_optimization_profile`               | returns -1                           |
| `IBuilderConfig.set_compute_capability`                 | returns False                        |
| `IBuilderConfig.create_timing_cache`                    | returns None                         |
| `IBuilderConfig.set_timing_cache`                       | returns False; None: TypeError       |
| `IBuilderConfig.get_timing_cache`                       | returns None                         |
| `Runtime.deserialize_cuda_engine`                       | returns None                         |
| `ICudaEngine.get_tensor_name`                           | returns None                         |
| `ICudaEngine.create_runtime_config`                     | returns None                         |
| `ICudaEngine.create_execution_context`                  | returns None                         |
| `IRuntimeConfig.create_runtime_cache`                   | returns None                         |
| `IRuntimeConfig.set_runtime_cache`                      | returns False                        |
| `IRuntimeCache.deserialize`                             | returns False                        |
| `IRuntimeCache.serialize`                               | returns None                         |
| `IExecutionContext.set_optimization_profile_async`      | raises RuntimeError                  |
| `IExecutionContext.set_input_shape`                     | returns False                        |
| `IExecutionContext.set_tensor_address`                  | returns False                        |
| `IExecutionContext.infer_shapes`                        | raises RuntimeError, or returns names|
| `IExecutionContext.set_device_memory`                   | returns None, as if it had worked    |
| `IExecutionContext.execute_async_v3`                    | returns False                        |
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

from sbert_infer.errors import EngineError

logger = logging.getLogger(__name__)

_PACKAGES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx-cu13"}  # module -> its name for pip
# The first versions with all features used here: 64-bit activation memory; built-in CUDA graphs.
_OLDEST = {"tensorrt": (10, 8), "tensorrt_rtx": (1, 2)}


@dataclass(frozen=True)
class TensorRT:
    """An installed TensorRT, and how it differs from the others."""

    module: Any
    name: str  # of the module: tensorrt or tensorrt_rtx
    version: str
    any_target: bool  # can build for GPUs that this machine does not have
    timing_cache: bool  # can reuse the kernel timings of earlier builds
    own_graphs: bool  # captures CUDA graphs by itself
    user_allocation: bool  # must be told at build time that we allocate activation memory

    @property
    def log(self) -> Any:
        """The TensorRT logger of this process. Its `words()` returns and clears the last errors."""
        return _make_log(self.module.ILogger)


@functools.cache
def _make_log(base: Any) -> Any:
    """Return the one logger of this process, which is never freed.

    TensorRT has a single logger, and logs a message to it when an object is made with another one.
    It does so while holding a lock, and Python may then switch to a thread that waits for that lock
    with the GIL held. So two threads with a logger each would deadlock.
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
            while self.errors:  # TensorRT's own threads also append to it
                found.append(self.errors.popleft())
            return "; ".join(dict.fromkeys(found))

    return Log()


def installed() -> list[TensorRT]:
    """Return every usable TensorRT; the full one comes before TensorRT-RTX."""
    return [trt for name in _PACKAGES if (trt := _load_if_there(name)) is not None]


def why_none() -> str:
    """Return why no TensorRT is usable: none is installed, or the one that is does not work."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is not None:
            try:
                load(name)
            except EngineError as error:
                return str(error)
    return "TensorRT is not installed (pip install 'sbert-infer[tensorrt]')"


def load(name: str) -> TensorRT:
    """Import a TensorRT by the name of its module, `tensorrt` or `tensorrt_rtx`."""
    if name not in _PACKAGES:
        raise ValueError(f"name must be one of {', '.join(_PACKAGES)}, got {name!r}")
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # an OSError if one of its libraries is missing
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
