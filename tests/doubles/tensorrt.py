"""A double of TensorRT's runtime, on the double of a GPU: NOT TensorRT, and no proof of speed or numerics.

Its classes have the names and parameters of the real ones (a test compares them), and hold to
NVIDIA's rules:

- the memory for a context's activations belongs to one stream at a time, and every context is given it;
- a context is changed only before its graph is captured: a graph of a context that was changed or freed is void;
- a context must have run once in its shape before it is captured, and contexts are made one at a time;
- the vectors are those of the ONNX model on onnxruntime's CPU provider.

Every rule that is broken raises `Misuse`, which no code under test catches.
"""

from __future__ import annotations

import importlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime

from sbert_infer.artifact.profiles import Profile
from sbert_infer.backends.tensorrt.versions import TensorRT
from tests.doubles.cuda import Machine, Misuse

REAL_TRT: Any = importlib.import_module("tensorrt_rtx")

MAGIC = b"double of an engine:"


class DoubleContext:
    """In place of `IExecutionContext`."""

    def __init__(self, engine: DoubleEngine) -> None:
        self._engine, self._machine = engine, engine._machine
        self._profile: Profile | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory: tuple[int, int] | None = None
        self._ready = False  # has run since its last change
        self._version = 0  # counts changes
        self._machine.alive["context"] += 1

    def __del__(self) -> None:
        if any(address not in self._machine.memory for address in self._addresses.values()):
            self._machine.broken.append("a context is freed after its buffers")
        self._machine.calls.append(("~IExecutionContext",))
        self._machine.alive["context"] -= 1

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._changed("set_optimization_profile_async", profile_index)

        def switch() -> None:
            self._profile = self._engine._profiles[profile_index]

        self._machine.enqueue(stream_handle, switch)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._changed("set_input_shape", name, shape)
        if self._profile is None:
            raise Misuse("a shape is set before the profile's switch is done")
        batch, length = shape
        if length != self._profile.length or not 1 <= batch <= self._profile.max_batch:
            return self._engine._complain(f"{name} {shape} is outside {self._profile}")
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._changed("set_tensor_address", name, memory)
        if memory not in self._machine.memory:
            return self._engine._complain(f"{name} is not on the GPU")
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        self._machine.calls.append(("infer_shapes",))
        return self._shapeless()

    def set_device_memory(self, memory: int, size: int) -> None:
        self._changed("set_device_memory", memory, size)
        self._memory = (memory, size)
        self._engine._preparing = False

    def execute_async_v3(self, stream_handle: int) -> bool:
        self._machine.calls.append(("execute_async_v3", stream_handle))
        if self._machine.failure("execute_async_v3") is not None:
            return self._engine._complain("the kernel fell over")
        self._check(stream_handle)
        self._machine.enqueue(stream_handle, _kernel_of(self))
        self._ready = True
        return True

    def _shapeless(self) -> list[str]:
        return [name for name in ("input_ids", "attention_mask") if name not in self._shapes]

    def _check(self, stream: int) -> None:
        missing = set(self._engine._tensors) - set(self._addresses)
        if missing or self._shapeless() or self._memory is None:
            raise Misuse(f"the context is not ready: {missing or 'its shape or memory is missing'}")
        if self._machine.streams[stream].recording is not None and not self._ready:
            raise Misuse("captured before it has run once in this shape")
        memory, size = self._memory
        if size < self._engine.device_memory_size_v2 or memory not in self._machine.memory:
            raise Misuse("too little memory for activations")
        if self._machine.owner.setdefault(memory, stream) != stream:
            raise Misuse("two streams share the memory for activations")

    def _kernel(self, version: int) -> None:
        if version != self._version:
            raise Misuse("a graph of a context that was changed")
        self._machine.before_kernel()
        self._machine.kernels += 1
        feed = {
            name: self._machine.at(self._addresses[name], np.int64, self._shapes.get(name, ()))
            for name in self._engine._inputs
        }
        (result,) = self._engine._session.run(None, feed)
        self._machine.at(self._addresses[self._engine._output], result.dtype, result.shape)[:] = result

    def _changed(self, *call: Any) -> None:
        self._machine.calls.append(call)
        self._ready = False
        self._version += 1


def _kernel_of(context: DoubleContext) -> Callable[[], object]:
    """Queued work and graphs don't keep a context alive."""
    reference, version = weakref.ref(context), context._version

    def work() -> None:
        found = reference()
        if found is None:
            raise Misuse("work of a context that was freed")
        found._kernel(version)

    return work


class DoubleConfig:
    """In place of `IRuntimeConfig`."""

    cuda_graph_strategy: Any = None

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> Any:
        return object()

    def set_runtime_cache(self, cache: Any) -> bool:
        self._machine.calls.append(("set_runtime_cache", cache))
        return True


class DoubleEngine:
    """In place of `ICudaEngine`."""

    device_memory_size_v2 = 4096

    def __init__(self, machine: Machine, log: Any, profiles: Sequence[Profile], onnx_model: bytes) -> None:
        self._machine, self._log, self._profiles = machine, log, profiles
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(onnx_model, options, providers=["CPUExecutionProvider"])
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        (output,) = self._session.get_outputs()
        self._output, self._output_shape = output.name, output.shape
        self._tensors: list[str] = [*self._inputs, self._output]
        self._preparing = False
        machine.alive["engine"] += 1

    def __del__(self) -> None:
        self._machine.calls.append(("~ICudaEngine",))
        self._machine.alive["engine"] -= 1

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return self._tensors[index]

    def get_tensor_location(self, name: str) -> Any:
        return REAL_TRT.TensorLocation.DEVICE

    def get_tensor_shape(self, name: str) -> Any:
        return REAL_TRT.Dims([size if isinstance(size, int) else -1 for size in self._output_shape])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
        profile = self._profiles[profile_index]
        return [REAL_TRT.Dims([n, profile.length]) for n in (1, profile.best_batch, profile.max_batch)]

    def create_runtime_config(self) -> DoubleConfig:
        return DoubleConfig(self._machine)

    def create_execution_context(self, strategy: Any) -> DoubleContext | None:
        self._machine.calls.append(("create_execution_context", strategy))
        user_managed = REAL_TRT.ExecutionContextAllocationStrategy.USER_MANAGED
        if (strategy._strategy if isinstance(strategy, DoubleConfig) else strategy) != user_managed:
            raise Misuse("every context would have its own memory for activations")
        if self._preparing:
            raise Misuse("two threads make contexts of one engine at once")
        self._preparing = True
        time.sleep(0.005)
        return DoubleContext(self)

    def _complain(self, text: str) -> bool:
        self._log.log(REAL_TRT.ILogger.ERROR, text)
        return False


class DoubleTensorRT:
    """In place of the module: TensorRT's real enums and logger, and a runtime that loads doubles of engines."""

    ILogger = REAL_TRT.ILogger
    ExecutionContextAllocationStrategy = REAL_TRT.ExecutionContextAllocationStrategy
    CudaGraphStrategy = REAL_TRT.CudaGraphStrategy
    TensorLocation = REAL_TRT.TensorLocation

    def __init__(self, machine: Machine, profiles: Sequence[Profile]) -> None:
        class Runtime:
            def __init__(self, logger: Any) -> None:
                self._logger = logger

            def deserialize_cuda_engine(self, serialized_engine: bytes) -> DoubleEngine | None:
                machine.calls.append(("deserialize_cuda_engine", machine.device))
                if not serialized_engine.startswith(MAGIC):
                    self._logger.log(REAL_TRT.ILogger.ERROR, "Serialization assertion failed:\n magic tag")
                    return None
                return DoubleEngine(machine, self._logger, profiles, serialized_engine[len(MAGIC) :])

        self.Runtime = Runtime


def double_tensorrt(machine: Machine, profiles: Sequence[Profile], *, rtx: bool = False) -> TensorRT:
    """TensorRT, or TensorRT-RTX, on that machine, whose engines have these profiles."""
    name = "tensorrt_rtx" if rtx else "tensorrt"
    module = DoubleTensorRT(machine, profiles)
    return TensorRT(module, name, "0.0", any_target=rtx, timing_cache=not rtx, own_graphs=rtx, user_allocation=rtx)
