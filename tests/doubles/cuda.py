"""A double of GPUs and CUDA for machines without them. It proves nothing about speed or numerics.

It replaces `cuda.bindings.runtime` and the driver, with the same names and parameters (a test
compares them with the real package), and is as strict and as lazy as a GPU may be:

- device memory has made-up addresses; only copies can access it;
- work on a stream is queued, and runs only when something waits for it, so that a missing wait
  gives wrong vectors;
- a stream belongs to one GPU, and may be used only while that is the thread's current GPU;
- a graph records work, and replays what was recorded;
- handles are the real package's objects, not numbers, and a failure is a code, not an exception.

Breaking a rule raises `Misuse`, which no code under test catches.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

REAL_CUDA: Any = importlib.import_module("cuda.bindings.runtime")


# Functions that return something beside the code: None if they fail. Others return the code only.
WITH_RESULT = {
    "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags", "cudaMalloc", "cudaHostAlloc",
    "cudaStreamEndCapture", "cudaGraphInstantiate",
}  # fmt: skip


class Misuse(BaseException):
    """A call on which a real GPU would crash, or sometimes return wrong results."""


class Machine:
    """The GPUs, their memory, and a record of all calls."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        self.driver = "driver 580"  # TensorRT-RTX takes compiled kernels of the same driver only
        self.calls: list[tuple[Any, ...]] = []
        self.failures: dict[str, list[Any]] = {}  # function -> codes of its next calls; None for success
        self.memory: dict[int, npt.NDArray[np.uint8]] = {}  # memory of all GPUs, by address
        self.pinned: dict[int, npt.NDArray[np.uint8]] = {}
        self.streams: dict[int, DoubleStream] = {}
        self.owner: dict[int, int] = {}  # activation memory -> the stream that uses it
        self.alive: Counter[str] = Counter()
        self.broken: list[str] = []  # broken rules, where an exception would be lost
        self.before_kernel: Callable[[], object] = lambda: None
        self.kernels = 0  # number of times the model ran
        self.compiled = 0  # number of shapes for which TensorRT-RTX compiled kernels
        self.launches = 0  # number of graph launches
        self._current = threading.local()
        self.numbers = itertools.count(1)

    @property
    def device(self) -> int:
        return getattr(self._current, "device", 0)

    @device.setter
    def device(self, device: int) -> None:
        self._current.device = device

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def failure(self, name: str) -> Any:
        """Return the code that the next call of this function must fail with, or None."""
        codes = self.failures.get(name)
        return codes.pop(0) if codes else None

    def at(self, address: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return device memory as an array."""
        if address not in self.memory:
            raise Misuse(f"{address:#x} is no memory of a GPU")
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size > len(self.memory[address]):
            raise Misuse(f"{size} bytes in a buffer of {len(self.memory[address])}")
        return self.memory[address][:size].view(dtype).reshape(shape)

    def enqueue(self, handle: Any, work: Callable[[], object]) -> None:
        stream = self.streams[int(handle)]
        if stream.device != self.device:
            raise Misuse(f"a stream of GPU {stream.device} is used while {self.device} is current")
        (stream.queue if stream.recording is None else stream.recording).append(work)


class DoubleStream:
    def __init__(self, device: int) -> None:
        self.device = device
        self.queue: list[Callable[[], object]] = []
        self.recording: list[Callable[[], object]] | None = None
        self.recorder = 0

    def drain(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class DoubleRuntime:
    """Replaces the module `cuda.bindings.runtime`, whose functions return an error code first."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._events: dict[int, Callable[[], object]] = {}
        self._graphs: dict[int, list[Callable[[], object]]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return a real enum or flag. Refuse a function, which would call the real CUDA."""
        found = getattr(REAL_CUDA, name)
        if callable(found) and not isinstance(found, type):
            raise Misuse(f"the double has no {name}")
        return found

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return (
            found if not callable(found) or name.startswith("_") or isinstance(found, type) else self._kept(name, found)
        )

    def _kept(self, name: str, function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def call(*args: Any) -> tuple[Any, ...]:
            self._machine.calls.append((name, *args))
            code = self._machine.failure(name)
            if code is None:
                return (self.cudaError_t.cudaSuccess, *function(*args))
            if name == "cudaStreamEndCapture":  # it ends the recording even if it fails
                self._machine.streams[int(args[0])].recording = None
            return (code, None) if name in WITH_RESULT else (code,)

        return call

    def cudaGetErrorString(self, error: Any) -> tuple[Any, ...]:  # noqa: N802
        return (REAL_CUDA.cudaGetErrorString(error)[1],)

    def cudaGetLastError(self) -> tuple[Any, ...]:  # noqa: N802
        return ()

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        if device >= self._machine.gpus:
            raise Misuse(f"there is no GPU {device}")
        self._machine.device = device
        return ()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        if flags != self.cudaStreamNonBlocking:
            raise Misuse("a stream that waits for the default stream")
        handle = self._new("stream")
        self._machine.streams[handle] = DoubleStream(self._machine.device)
        return (REAL_CUDA.cudaStream_t(handle),)

    def cudaStreamDestroy(self, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        if self._machine.streams.pop(int(stream)).queue:
            raise Misuse("a stream with work left is freed")
        return self._gone("stream")

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return (REAL_CUDA.cudaEvent_t(self._new("event")),)

    def cudaEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        found = self._machine.streams[int(stream)]
        if found.recording is not None:
            raise Misuse("an event to wait for is recorded into a graph")
        marker = lambda: None  # noqa: E731
        self._machine.enqueue(stream, marker)

        def wait() -> None:
            while marker in found.queue:
                found.queue.pop(0)()

        self._events[int(event)] = wait
        return ()

    def cudaEventSynchronize(self, event: Any) -> tuple[Any, ...]:  # noqa: N802
        self._events[int(event)]()
        return ()

    def cudaEventDestroy(self, event: Any) -> tuple[Any, ...]:  # noqa: N802
        return self._gone("event")

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        self._refuse_while_recording("cudaMalloc")
        address = 0x7F00_0000_0000 + (self._new("device buffer") << 24)
        self._machine.memory[address] = np.full(size, 0xAB, np.uint8)
        return (address,)

    def cudaFree(self, devPtr: int) -> tuple[Any, ...]:  # noqa: N802, N803
        del self._machine.memory[devPtr]
        self._machine.owner.pop(devPtr, None)
        return self._gone("device buffer")

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:  # noqa: N802
        self._refuse_while_recording("cudaHostAlloc")
        self._new("host buffer")
        block = np.full(size + 64, 0xCD, np.uint8)
        start = -block.ctypes.data % 64
        address = block.ctypes.data + start
        self._machine.pinned[address] = block  # keeps the block at its address
        return (address,)

    def cudaFreeHost(self, ptr: int) -> tuple[Any, ...]:  # noqa: N802
        del self._machine.pinned[ptr]
        return self._gone("host buffer")

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        machine, to_device = self._machine, kind == self.cudaMemcpyKind.cudaMemcpyHostToDevice
        device, host = (dst, src) if to_device else (src, dst)
        if host not in machine.pinned or device not in machine.memory:
            raise Misuse(f"a copy {kind.name} from {src:#x} to {dst:#x}")

        def copy() -> None:
            there = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(host))
            if to_device:
                machine.at(device, np.uint8, (count,))[:] = there
            else:
                there[:] = machine.at(device, np.uint8, (count,))

        machine.enqueue(stream, copy)
        return ()

    def cudaStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:  # noqa: N802
        if mode != self.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal:
            raise Misuse("a capture that other threads' allocations would break")
        found = self._machine.streams[int(stream)]
        found.recording, found.recorder = [], threading.get_ident()
        return ()

    def cudaStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        found = self._machine.streams[int(stream)]
        graph = self._new("graph")
        self._graphs[graph], found.recording = found.recording or [], None
        return (REAL_CUDA.cudaGraph_t(graph),)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        executable = self._new("graph executable")
        self._graphs[executable] = self._graphs[int(graph)]
        return (REAL_CUDA.cudaGraphExec_t(executable),)

    def cudaGraphLaunch(self, graphExec: Any, stream: Any) -> tuple[Any, ...]:  # noqa: N802, N803
        self._machine.launches += 1
        for work in self._graphs[int(graphExec)]:
            self._machine.enqueue(stream, work)
        return ()

    def cudaGraphDestroy(self, graph: Any) -> tuple[Any, ...]:  # noqa: N802
        del self._graphs[int(graph)]
        return self._gone("graph")

    def cudaGraphExecDestroy(self, graphExec: Any) -> tuple[Any, ...]:  # noqa: N802, N803
        del self._graphs[int(graphExec)]
        return self._gone("graph executable")

    def _new(self, kind: str) -> int:
        self._machine.alive[kind] += 1
        return next(self._machine.numbers)

    def _gone(self, kind: str) -> tuple[Any, ...]:
        self._machine.alive[kind] -= 1
        return ()

    def _refuse_while_recording(self, name: str) -> None:
        streams = self._machine.streams.values()
        if any(s.recording is not None and s.recorder == threading.get_ident() for s in streams):
            raise Misuse(f"{name} while a graph is recorded")


def double_driver(machine: Machine, *, code: int = 0, name: str = "Double GPU", capability: int = 89) -> Any:
    """Replaces libcuda, as loaded by ctypes."""

    def give(target: Any, value: Any) -> int:
        target._obj.value = value
        return 0

    def attribute(target: Any, attribute: int, device: Any) -> int:
        return give(target, {75: capability // 10, 76: capability % 10}[attribute])

    def get_name(buffer: Any, size: int, device: Any) -> int:
        buffer.value = name.encode()[: size - 1]
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: code,
        cuDeviceGetCount=lambda target: give(target, machine.gpus),
        cuDeviceGet=lambda target, ordinal: give(target, ordinal) if ordinal < machine.gpus else 101,
        cuDeviceGetAttribute=attribute,
        cuDeviceGetName=get_name,
        cuGetErrorName=lambda number, target: give(target, f"CUDA_ERROR_{number}".encode()),
    )
