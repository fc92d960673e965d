"""A TensorRT engine, loaded onto a GPU and checked against the model's interface and profiles."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sbert_infer.artifact.profiles import Profile
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError


class LoadError(EngineError):
    """A TensorRT engine for another version, GPU or model, which must be built again."""


@dataclass(frozen=True)
class Interface:
    """The names of a TensorRT engine's tensors, and the length of its vectors."""

    inputs: tuple[str, ...]
    output: str
    dim: int


class LoadedEngine:
    """A TensorRT engine on one GPU."""

    def __init__(
        self,
        trt: TensorRT,
        serialized: bytes,
        profiles: Sequence[Profile],
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
        self._check_profiles(profiles)
        self._config = self._make_config(cuda_graphs) if trt.own_graphs else None
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
            raise EngineError(f"{self.trt.name}: {call} failed: {self._log.words() or 'no reason was given'}")

    def close(self) -> None:
        """Free the TensorRT engine. Its contexts must be freed before."""
        self._config = None
        self._engine = None
        self._runtime = None

    def _make_config(self, cuda_graphs: bool) -> Any:
        """Return the runtime configuration for TensorRT-RTX.

        It compiles kernels for each shape while it runs, and captures a CUDA graph only when it has
        them.
        """
        module = self.trt.module
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(module.ExecutionContextAllocationStrategy.USER_MANAGED)
        strategies = module.CudaGraphStrategy
        config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if cuda_graphs else strategies.DISABLED
        config.set_runtime_cache(config.create_runtime_cache())  # compiles a kernel once for all contexts
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
        dim = tuple(engine.get_tensor_shape(self.interface.output))[-1]
        if dim != self.interface.dim:
            raise LoadError(f"the TensorRT engine's vectors have {dim} dimensions, not {self.interface.dim}")

    def _check_profiles(self, profiles: Sequence[Profile]) -> None:
        count = int(self._engine.num_optimization_profiles)
        shapes = [self._engine.get_tensor_profile_shape("input_ids", index) for index in range(count)]
        there = [tuple(tuple(shape) for shape in triple) for triple in shapes]
        wanted = [tuple((batch, p.length) for batch in (1, p.best_batch, p.max_batch)) for p in profiles]
        if there != wanted:
            raise LoadError(f"the engine was built for the shapes {there}, not {wanted}: export the model again")
