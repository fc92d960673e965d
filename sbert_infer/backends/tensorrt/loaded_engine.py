"""A TensorRT engine, loaded onto a GPU and checked against the model's interface and shapes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.runtime_cache import RuntimeCache
from sbert_infer.backends.tensorrt.tensors import input_shape
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError
from sbert_infer.types import Shape


class LoadError(EngineError):
    """A TensorRT engine for another version, GPU or model, which must be built again."""


@dataclass(frozen=True)
class Interface:
    """The names of a TensorRT engine's tensors, and the length and type of its vectors."""

    inputs: tuple[str, ...]
    output: str
    dim: int
    dtype: str = "FLOAT"  # TensorRT's name for the output's type; HALF or BF16 for token vectors


class LoadedEngine:
    """A TensorRT engine on one GPU."""

    def __init__(
        self,
        trt: TensorRT,
        serialized: bytes,
        shapes: Sequence[Shape],
        interface: Interface,
        device: int,
        cuda_graphs: bool,
    ) -> None:
        cuda.set_device(device)
        self.trt, self.device, self.interface, self._log = trt, device, interface, trt.log
        try:
            self._runtime = trt.module.Runtime(self._log)
        except TypeError as error:  # raised by the bindings for a null pointer
            raise EngineError(f"{trt.name} {trt.version} can't start: {self._log.words() or error}") from error
        self._engine = self._runtime.deserialize_cuda_engine(serialized)
        if self._engine is None:
            why = self._log.words() or "it was built for another version or another GPU"
            raise LoadError(f"{trt.name} {trt.version} can't load the engine on cuda:{device}: {why}")
        self._check_tensors()
        self._check_profiles(shapes)
        self._config = self._make_config(cuda_graphs) if trt.own_graphs else None
        self._kernels = RuntimeCache(trt, self._config, serialized, device) if trt.own_graphs else None
        self.captures = cuda_graphs and not trt.own_graphs  # whether we capture CUDA graphs
        # Contexts may run concurrently, but making them from one engine is not thread-safe.
        self.preparing = threading.Lock()

    @property
    def activation_bytes(self) -> int:
        """Bytes of activation memory that a context needs for the largest profile."""
        return int(self._engine.device_memory_size_v2)

    def make_context(self) -> Any:
        """Create an execution context without activation memory of its own."""
        user_managed = self.trt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(user_managed if self._config is None else self._config)
        self.require(context is not None, "create_execution_context")
        return context

    def require(self, success: bool, call: str) -> None:
        """Raise an error with the name of `call` and TensorRT's message, unless it succeeded."""
        if not success:
            raise self._failure(call, "no reason was given")

    def attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the bindings, and return its result.

        Raise an error as `require` does if it returns False or raises: some do one, some the other.
        """
        subject = f"({arguments[0]})" if arguments and isinstance(arguments[0], str) else ""
        try:
            result = call(*arguments)
        except RuntimeError as error:
            raise self._failure(call.__name__ + subject, str(error)) from error
        self.require(result is not False, call.__name__ + subject)
        return result

    def save_kernels(self) -> None:
        """Keep the kernels that TensorRT-RTX has compiled so far, for the next process."""
        if self._kernels is not None:
            cuda.set_device(self.device)
            with self.preparing:  # no context is being made meanwhile, which would compile more
                self._kernels.save()

    def close(self) -> None:
        """Free the TensorRT engine. Its contexts must be freed before."""
        with suppress(EngineError):  # CUDA may be gone; the kernels can be compiled again
            self.save_kernels()
        self._kernels = None
        self._config = None
        self._engine = None
        self._runtime = None

    def _failure(self, call: str, otherwise: str) -> EngineError:
        return EngineError(f"{self.trt.name}: {call} failed: {self._log.words() or otherwise}")

    def _make_config(self, cuda_graphs: bool) -> Any:
        """Return the runtime configuration for TensorRT-RTX.

        It compiles kernels for each shape while it runs, and captures a CUDA graph only when it has
        them. It is told to compile them in a shape's first run, which warm-up makes, and not in the
        background during later ones.
        """
        module = self.trt.module
        config = self._engine.create_runtime_config()
        self.require(config is not None, "create_runtime_config")
        config.set_execution_context_allocation_strategy(module.ExecutionContextAllocationStrategy.USER_MANAGED)
        graphs = module.CudaGraphStrategy
        config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if cuda_graphs else graphs.DISABLED
        kernels = module.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
        return config

    def _check_tensors(self) -> None:
        engine, on_gpu = self._engine, self.trt.module.TensorLocation.DEVICE
        there = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        wanted = {*self.interface.inputs, self.interface.output}
        if there != wanted:
            raise LoadError(
                f"the TensorRT engine's tensors are {sorted(there)}, not {sorted(wanted)}: export the model again"
            )
        if hosted := [name for name in sorted(there) if engine.get_tensor_location(name) != on_gpu]:
            raise LoadError(f"the TensorRT engine needs {', '.join(hosted)} in host memory: export the model again")
        shape, dtype = engine.get_tensor_shape(self.interface.output), engine.get_tensor_dtype(self.interface.output)
        if (dim := tuple(shape)[-1]) != self.interface.dim:
            raise LoadError(f"the TensorRT engine's vectors have {dim} dimensions, not {self.interface.dim}")
        if dtype.name != self.interface.dtype:
            raise LoadError(f"the TensorRT engine's vectors are {dtype.name}, not {self.interface.dtype}")

    def _check_profiles(self, shapes: Sequence[Shape]) -> None:
        """Raise unless there is one profile for each shape, in order, that allows nothing else."""
        for name in self.interface.inputs:
            there = [self._profile(name, index) for index in range(int(self._engine.num_optimization_profiles))]
            wanted = [{input_shape(name, shape)} for shape in shapes]
            if there != wanted:
                raise LoadError(
                    f"the engine was built for {name} of {_list(there)}, not of {_list(wanted)}: export the model again"
                )

    def _profile(self, name: str, index: int) -> set[tuple[int, ...]]:
        """Return the least, best and largest shape of an input: a single one if it is fixed."""
        return {tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, index)}


def _list(profiles: Iterable[Iterable[tuple[int, ...]]]) -> str:
    return ", ".join(" to ".join(map(str, sorted(profile))) for profile in profiles)
