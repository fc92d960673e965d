"""A double of TensorRT's runtime, on the double of a GPU.

It proves nothing about speed or numerics. Its classes have the names and parameters of the real
ones (a test compares them), fail as the real bindings do (False, None or a `RuntimeError`, with a
message in the log; see the table in `versions.py`), and enforce NVIDIA's rules:

- activation memory must be given to each context, and is used on one stream at a time;
- a context must not be changed or freed once a graph was captured from it, or the graph is void;
- a context must have run its shape once before capture, and contexts are made one at a time;
- TensorRT-RTX's runtime cache must outlive the contexts, and is held by its user alone;
- the vectors are those of the ONNX model on onnxruntime's CPU provider.

Breaking a rule raises `Misuse`, which no code under test catches.
"""

from __future__ import annotations

import importlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime

from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.tensorrt.tensors import input_shape
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.types import Shape
from tests.doubles.cuda import Machine, Misuse

REAL_TRT: Any = importlib.import_module("tensorrt_rtx")

MAGIC = b"double of an engine:"
_TYPES = {"tensor(float)": "FLOAT", "tensor(float16)": "HALF", "tensor(bfloat16)": "BF16"}


class DoubleContext:
    """Replaces `IExecutionContext`."""

    def __init__(self, engine: DoubleEngine, config: DoubleConfig | None) -> None:
        self._engine, self._machine = engine, engine._machine
        self._config = config
        self._shape: Shape | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory: tuple[int, int] | None = None
        self._ready = False  # whether it has run since its last change
        self._version = 0  # number of changes
        self._machine.alive["context"] += 1

    def __del__(self) -> None:
        if any(address not in self._machine.memory for address in self._addresses.values()):
            self._machine.broken.append("a context is freed after its buffers")
        if self._config is not None and self._config._cache_is_gone():
            self._machine.broken.append("a context is freed after its runtime cache")
        self._machine.calls.append(("~IExecutionContext",))
        self._machine.alive["context"] -= 1

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._changed("set_optimization_profile_async", profile_index)
        failed = self._machine.failure("set_optimization_profile_async") is not None
        if failed or not 0 <= profile_index < len(self._engine._profiles):
            self._engine._complain(f"there is no profile {profile_index}")
            raise RuntimeError("Error in set optimization profile async.")

        def switch() -> None:
            self._shape = self._engine._profiles[profile_index]

        self._machine.enqueue(stream_handle, switch)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._changed("set_input_shape", name, shape)
        if self._shape is None:
            raise Misuse("a shape is set before the profile's switch is done")
        if name not in self._engine._inputs:
            return self._engine._complain(f"there is no input {name}")
        if shape != input_shape(name, self._shape):
            return self._engine._complain(f"{name} {shape} is outside {self._shape}")
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._changed("set_tensor_address", name, memory)
        if name not in self._engine._tensors:
            return self._engine._complain(f"there is no tensor {name}")
        if memory not in self._machine.memory:
            return self._engine._complain(f"{name} is not on the GPU")
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        self._machine.calls.append(("infer_shapes",))
        if self._machine.failure("infer_shapes") is not None:
            self._engine._complain("shapes contradict each other")
            raise RuntimeError("infer_shapes error code: -1")
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
        if self._config is not None:
            self._config._compile(self._shape)
        self._machine.enqueue(stream_handle, _kernel_of(self))
        self._ready = True
        return True

    def _shapeless(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

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
            name: self._machine.at(self._addresses[name], np.int64, self._shapes[name]) for name in self._engine._inputs
        }
        (result,) = self._engine._session.run([self._engine._output], feed)
        self._machine.at(self._addresses[self._engine._output], result.dtype, result.shape)[:] = result

    def _changed(self, *call: Any) -> None:
        self._machine.calls.append(call)
        self._ready = False
        self._version += 1


def _kernel_of(context: DoubleContext) -> Callable[[], object]:
    """Return the work of a kernel. Queued work and graphs do not keep a context alive."""
    reference, version = weakref.ref(context), context._version

    def work() -> None:
        found = reference()
        if found is None:
            raise Misuse("work of a context that was freed")
        found._kernel(version)

    return work


class DoubleRuntimeCache:
    """Replaces `IRuntimeCache`: the shapes for which kernels were compiled, with one driver."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._shapes: set[str] = set()
        machine.alive["runtime cache"] += 1

    def __del__(self) -> None:
        self._machine.calls.append(("~IRuntimeCache",))
        self._machine.alive["runtime cache"] -= 1

    def serialize(self) -> bytes | None:
        if self._machine.failure("serialize") is not None:
            return None
        return "\n".join([self._machine.driver, *sorted(self._shapes)]).encode()

    def deserialize(self, blob: bytes) -> bool:
        driver, *shapes = blob.decode().split("\n")
        if driver != self._machine.driver:
            return False  # and it is as before
        self._shapes.update(shapes)
        return True


class DoubleConfig:
    """Replaces `IRuntimeConfig`."""

    cuda_graph_strategy: Any = None
    dynamic_shapes_kernel_specialization_strategy: Any = None

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._strategy: Any = None
        self._cache: weakref.ref[DoubleRuntimeCache] | None = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> DoubleRuntimeCache | None:
        if self._machine.failure("create_runtime_cache") is not None:
            return None
        return DoubleRuntimeCache(self._machine)

    def set_runtime_cache(self, cache: Any) -> bool:
        self._machine.calls.append(("set_runtime_cache",))
        if self._machine.failure("set_runtime_cache") is not None:
            return False
        self._cache = weakref.ref(cache)
        return True

    def _cache_is_gone(self) -> bool:
        return self._cache is not None and self._cache() is None

    def _compile(self, shape: Shape | None) -> None:
        """Compile kernels for a shape, unless they are in the cache."""
        if self._cache_is_gone():
            raise Misuse("the runtime cache was freed while its contexts run")
        cache = None if self._cache is None else self._cache()
        if cache is None or repr(shape) not in cache._shapes:
            self._machine.compiled += 1
        if cache is not None:
            cache._shapes.add(repr(shape))


class DoubleEngine:
    """Replaces `ICudaEngine`."""

    device_memory_size_v2 = 4096

    def __init__(self, machine: Machine, log: Any, profiles: Sequence[Shape], onnx_model: bytes, output: str) -> None:
        self._machine, self._log, self._profiles = machine, log, profiles
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(onnx_model, options, providers=["CPUExecutionProvider"])
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        (tensor,) = [tensor for tensor in self._session.get_outputs() if tensor.name == output]
        self._output, self._output_shape, self._output_type = output, tensor.shape, tensor.type
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

    def get_tensor_name(self, index: int) -> str | None:
        return self._tensors[index] if 0 <= index < len(self._tensors) else None

    def get_tensor_location(self, name: str) -> Any:
        return REAL_TRT.TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return getattr(REAL_TRT.DataType, _TYPES[self._output_type] if name == self._output else "INT64")

    def get_tensor_shape(self, name: str) -> Any:
        sizes = self._output_shape if name == self._output else [-1, -1]
        return REAL_TRT.Dims([size if isinstance(size, int) else -1 for size in sizes])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
        return [REAL_TRT.Dims(input_shape(name, self._profiles[profile_index]))] * 3

    def create_runtime_config(self) -> DoubleConfig | None:
        if self._machine.failure("create_runtime_config") is not None:
            return None
        return DoubleConfig(self._machine)

    def create_execution_context(self, strategy: Any) -> DoubleContext | None:
        self._machine.calls.append(("create_execution_context", strategy))
        user_managed = REAL_TRT.ExecutionContextAllocationStrategy.USER_MANAGED
        config = strategy if isinstance(strategy, DoubleConfig) else None
        if (strategy if config is None else config._strategy) != user_managed:
            raise Misuse("every context would have its own memory for activations")
        if config is not None and config._cache_is_gone():
            raise Misuse("a context is made with a runtime cache that was freed")
        if self._machine.failure("create_execution_context") is not None:
            self._complain("out of memory")
            return None
        if self._preparing:
            raise Misuse("two threads make contexts of one engine at once")
        self._preparing = True
        time.sleep(0.005)
        return DoubleContext(self, config)

    def _complain(self, text: str) -> bool:
        self._log.log(REAL_TRT.ILogger.ERROR, text)
        return False


class DoubleTensorRT:
    """Replaces the module: real enums and a real logger, and a runtime that loads doubles."""

    ILogger = REAL_TRT.ILogger
    DataType = REAL_TRT.DataType
    ExecutionContextAllocationStrategy = REAL_TRT.ExecutionContextAllocationStrategy
    CudaGraphStrategy = REAL_TRT.CudaGraphStrategy
    DynamicShapesKernelSpecializationStrategy = REAL_TRT.DynamicShapesKernelSpecializationStrategy
    TensorLocation = REAL_TRT.TensorLocation

    def __init__(self, machine: Machine, profiles: Sequence[Shape], output: str) -> None:
        class Runtime:
            def __init__(self, logger: Any) -> None:
                if machine.failure("Runtime") is not None:
                    raise TypeError("pybind11::init(): factory function returned nullptr")
                self._logger = logger

            def deserialize_cuda_engine(self, serialized_engine: bytes) -> DoubleEngine | None:
                machine.calls.append(("deserialize_cuda_engine", machine.device))
                if not serialized_engine.startswith(MAGIC):
                    self._logger.log(REAL_TRT.ILogger.ERROR, "Serialization assertion failed:\n magic tag")
                    return None
                return DoubleEngine(machine, self._logger, profiles, serialized_engine[len(MAGIC) :], output)

        self.Runtime = Runtime


def double_tensorrt(
    machine: Machine, profiles: Sequence[Shape], *, rtx: bool = False, output: str = SENTENCE
) -> TensorRT:
    """Return TensorRT, or TensorRT-RTX, on this machine, with engines built for these shapes."""
    name = "tensorrt_rtx" if rtx else "tensorrt"
    module = DoubleTensorRT(machine, profiles, output)
    return TensorRT(module, name, "0.0", any_target=rtx, timing_cache=not rtx, own_graphs=rtx, user_allocation=rtx)
