"""The NVIDIA driver, and the parts of CUDA that the TensorRT backend needs.

The driver is called through ctypes, so that it can be asked for on any machine, without a package,
and before any library that would crash without a driver. Streams, buffers, copies and graphs use
NVIDIA's `cuda-bindings`; see docs/adr/0009.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.errors import EngineError

# --------------------------------------------------------------------------------------------------
# The driver

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
DRIVER_CURE = "install NVIDIA's driver, 580 or newer; start a container with --gpus all"


def driver_problem() -> str | None:
    """Return why no GPU can be used, in one line; None if one can. Safe on any machine."""
    try:
        driver = _load_driver()
    except OSError:
        return "there is no NVIDIA driver"
    code = driver.cuInit(0)
    if code == _NO_DEVICE or (code == 0 and device_count() == 0):
        return "the NVIDIA driver sees no GPU"
    return f"the NVIDIA driver does not start (cuInit gives {_driver_error(driver, code)})" if code else None


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver runs, such as (12, 4); None without a driver."""
    version = ctypes.c_int()
    try:
        code = _load_driver().cuDriverGetVersion(ctypes.byref(version))  # needs no GPU, and no cuInit
    except (OSError, AttributeError):
        return None
    return None if code else (version.value // 1000, version.value % 1000 // 10)


def driver_release() -> str | None:
    """Return the driver's release, such as 580.95.05, from its management library, if known."""
    try:
        library: Any = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(80)
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
            return None
        library.nvmlShutdown()
        return text.value.decode(errors="replace") or None
    except (OSError, AttributeError):
        return None


def device_count() -> int:
    """Return the number of GPUs."""
    count = ctypes.c_int()
    _ask_driver("cuDeviceGetCount", ctypes.byref(count))
    return count.value


def compute_capability(device: int) -> str:
    """Return the GPU's architecture, such as sm89."""
    parts = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        _ask_driver("cuDeviceGetAttribute", ctypes.byref(value), attribute, _handle(device))
        parts.append(value.value)
    return f"sm{parts[0]}{parts[1]}"


def device_name(device: int) -> str:
    """Return the GPU's name, such as NVIDIA L4."""
    name = ctypes.create_string_buffer(256)
    _ask_driver("cuDeviceGetName", name, len(name), _handle(device))
    return name.value.decode(errors="replace")


def device_memory(device: int) -> int:
    """Return the size of the GPU's memory, in bytes."""
    size = ctypes.c_size_t()
    _ask_driver("cuDeviceTotalMem_v2", ctypes.byref(size), _handle(device))
    return size.value


def _handle(device: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _ask_driver("cuDeviceGet", ctypes.byref(handle), device)
    return handle


def _load_driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _ask_driver(name: str, *args: Any) -> None:
    try:
        driver = _load_driver()
    except OSError as error:
        raise EngineError("there is no NVIDIA driver") from error
    code = driver.cuInit(0) or getattr(driver, name)(*args)  # a second cuInit does nothing
    if code:
        raise EngineError(f"{name} failed: {_driver_error(driver, code)}")


def _driver_error(driver: Any, code: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"


# --------------------------------------------------------------------------------------------------
# The runtime


@functools.cache
def _runtime() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise EngineError("cuda-bindings is not installed: pip install cuda-bindings") from error


def require_bindings() -> None:
    """Raise an error that says what to install, unless `cuda-bindings` is installed."""
    _runtime()


def _call(name: str, *args: Any) -> Any:
    """Call a function of the CUDA runtime and return its result; an error names the function."""
    runtime = _runtime()
    code, *results = getattr(runtime, name)(*args)
    if code != runtime.cudaError_t.cudaSuccess:
        runtime.cudaGetLastError()  # clears the error, which the next call in this thread would report
        raise EngineError(f"{name} failed: {code.name} ({_meaning(code)})")
    return results[0] if results else None


def _meaning(code: Any) -> str:
    _, text = _runtime().cudaGetErrorString(code)
    return text.decode() if isinstance(text, bytes) else str(text)


def set_device(device: int) -> None:
    """Make `device` the current GPU of this thread."""
    _call("cudaSetDevice", device)


class Stream:
    """A queue of work on the current GPU, which runs in order, independently of other streams."""

    def __init__(self) -> None:
        runtime = _runtime()
        self.handle = _call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        try:
            # Waiting for this event sleeps. Waiting for a stream would spin, and take a core from
            # the tokenizer.
            flags = runtime.cudaEventBlockingSync | runtime.cudaEventDisableTiming
            self._done = _call("cudaEventCreateWithFlags", flags)
        except EngineError:
            _call("cudaStreamDestroy", self.handle)
            raise

    def __int__(self) -> int:
        return int(self.handle)

    def synchronize(self) -> None:
        """Wait until all work queued so far is done."""
        _call("cudaEventRecord", self._done, self.handle)
        _call("cudaEventSynchronize", self._done)

    def close(self) -> None:
        """Free the stream."""
        _call("cudaEventDestroy", self._done)
        _call("cudaStreamDestroy", self.handle)


class DeviceBuffer:
    """Memory of the current GPU."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)  # in bytes; an empty buffer would have no address
        self.pointer = int(_call("cudaMalloc", self.size))

    def close(self) -> None:
        """Free the memory."""
        _call("cudaFree", self.pointer)


class HostBuffer:
    """Page-locked host memory, from and to which the GPU copies while both keep working."""

    def __init__(self, dtype: npt.DTypeLike, count: int) -> None:
        size = np.dtype(dtype).itemsize * max(count, 1)
        self.pointer = int(_call("cudaHostAlloc", size, _runtime().cudaHostAllocDefault))
        self.array: npt.NDArray[Any] = _array_at(self.pointer, size).view(dtype)

    def close(self) -> None:
        """Free the memory. `array` must not be used afterwards."""
        _call("cudaFreeHost", self.pointer)


def _array_at(pointer: int, size: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))


def copy_to_device(target: DeviceBuffer, source: HostBuffer, size: int, stream: Stream) -> None:
    """Queue a copy of the first `size` bytes to the GPU."""
    kind = _runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
    _call("cudaMemcpyAsync", target.pointer, source.pointer, size, kind, stream.handle)


def copy_to_host(target: HostBuffer, source: DeviceBuffer, size: int, stream: Stream) -> None:
    """Queue a copy of the first `size` bytes to the host."""
    kind = _runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost
    _call("cudaMemcpyAsync", target.pointer, source.pointer, size, kind, stream.handle)


class Graph:
    """A CUDA graph: work that is recorded once and launched as a whole."""

    def __init__(self, stream: Stream, enqueue: Callable[[], object]) -> None:
        # Thread-local, so that other threads may allocate memory for batches of their own
        # meanwhile.
        mode = _runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _call("cudaStreamBeginCapture", stream.handle, mode)
        try:
            enqueue()
        except BaseException:
            self._abandon(stream)
            raise
        graph = _call("cudaStreamEndCapture", stream.handle)
        try:
            self._executable = _call("cudaGraphInstantiate", graph, 0)
        finally:
            _call("cudaGraphDestroy", graph)

    def launch(self, stream: Stream) -> None:
        """Queue the recorded work."""
        _call("cudaGraphLaunch", self._executable, stream.handle)

    def close(self) -> None:
        """Free the graph."""
        _call("cudaGraphExecDestroy", self._executable)

    @staticmethod
    def _abandon(stream: Stream) -> None:
        """End a failed recording, ignoring CUDA's errors, so that the stream is usable again."""
        with contextlib.suppress(EngineError):
            _call("cudaGraphDestroy", _call("cudaStreamEndCapture", stream.handle))
