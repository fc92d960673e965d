"""Building a TensorRT engine from an ONNX model.

TensorRT itself builds for a GPU of this machine; TensorRT-RTX builds for any GPU that it knows,
even on a machine without one.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from sbert_infer.artifact.profiles import Profile
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.cuda_packages import driver_too_old
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError

# Part of the cache key: raise it when a change here makes a different TensorRT engine.
BUILD_VERSION = 1

_BATCHED_INPUTS = ("input_ids", "attention_mask")
_SCALAR_INPUT = "prompt_length"
# Scratch memory that a single kernel may use. The matrix products of an encoder need far less; the
# default is the GPU's whole memory.
_WORKSPACE_BYTES = 1 << 30


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized TensorRT engine, and the kernel timings (empty with TensorRT-RTX)."""

    engine: bytes
    timing_cache: bytes


def targets(trt: TensorRT) -> list[str]:
    """Return the GPUs, such as sm89, that can be built for without having one.

    There are none with TensorRT itself.
    """
    if not trt.any_target:
        return []
    return [name.lower() for name in trt.module.ComputeCapability.__members__ if name.startswith("SM")]


def build_engine(
    trt: TensorRT,
    onnx_model: bytes,
    profiles: Sequence[Profile],
    *,
    target: str | None = None,
    device: int = 0,
    half: bool = True,
    timing_cache: bytes = b"",
    progress: Callable[[str, int, int], object] = lambda phase, done, steps: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> BuiltEngine:
    """Build a TensorRT engine with one optimization profile per `Profile`.

    Args:
        trt: the TensorRT that builds it, and the only version that can run it.
        onnx_model: the model, in standard operators; its types are kept as they are.
        profiles: the shapes that will run.
        target: the GPU to build for, one of `targets(trt)`; by default the GPU `device` of this
            machine.
        device: the GPU of this machine to use if no `target` is given.
        half: refuse a model whose matrix products are not in FP16.
        timing_cache: the timings from an earlier build with this version on this kind of GPU.
        progress: called from another thread with a phase's name, the number of steps done, and
            their total.
        cancelled: called between steps; if it returns True, the build ends with an `EngineError`.

    Ctrl-C stops the build at its next step.

    """
    if target is None:
        if problem := cuda.driver_problem() or driver_too_old(trt.name):
            raise EngineError(f"can't build a TensorRT engine for this machine's GPU: {problem}")
        target = cuda.compute_capability(device) if trt.any_target else None
    _check_target(trt, target)
    stop = threading.Event()
    monitor = _make_monitor(trt, progress, lambda: stop.is_set() or cancelled())

    def work() -> BuiltEngine:
        if not trt.any_target:
            cuda.set_device(device)  # applies to the calling thread only
        return _Build(trt, monitor).run(onnx_model, profiles, target, half, timing_cache)

    return _in_thread(work, stop)


def _in_thread(work: Callable[[], BuiltEngine], stop: threading.Event) -> BuiltEngine:
    """Run `work` in a thread of its own; set `stop` and wait for it if the caller is interrupted.

    In the caller's thread, a KeyboardInterrupt raised inside a callback would be lost in TensorRT's
    C++ code.
    """
    future: Future[BuiltEngine] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            # This frees TensorRT's objects here and in order. Otherwise the traceback would keep
            # them until the garbage collector runs.
            traceback.clear_frames(error.__traceback__)
            future.set_exception(error)

    thread = threading.Thread(target=run, name="sbert-infer-build")
    try:
        thread.start()
        while not future.done():
            wait([future], timeout=0.1)  # without a timeout, some systems would not deliver Ctrl-C
        return future.result()
    finally:
        stop.set()
        if thread.ident is not None:
            wait([future])  # the build ends at its next step


class _Build:
    """One build. Its monitor must outlive all TensorRT objects made from it."""

    def __init__(self, trt: TensorRT, monitor: Any) -> None:
        self.trt, self.monitor, self.log = trt, monitor, trt.log
        self.log.words()  # clears earlier errors
        try:
            self.builder = trt.module.Builder(self.log)
        except TypeError as error:  # raised by the bindings for a null pointer
            raise EngineError(f"{trt.name} {trt.version} can't start: {self.log.words() or error}") from error

    def run(
        self, onnx_model: bytes, profiles: Sequence[Profile], target: str | None, half: bool, timing_cache: bytes
    ) -> BuiltEngine:
        network = self.parse(onnx_model)
        if half:
            check_half(self.trt, network)
        config = self.configure(target)
        for profile in profiles:
            self.add_profile(network, config, profile)
        if self.trt.timing_cache and not self.set_timings(config, timing_cache):
            self.set_timings(config, b"")
        self.log.words()  # clears the complaint about an unsuitable timing cache, which is ignored
        serialized = self.builder.build_serialized_network(network, config)
        if self.monitor.failure is not None:
            raise self.monitor.failure
        if serialized is None:
            raise EngineError(self.failure("built no engine"))
        timings = config.get_timing_cache() if self.trt.timing_cache else None
        return BuiltEngine(bytes(serialized), b"" if timings is None else bytes(timings.serialize()))

    def set_timings(self, config: Any, content: bytes) -> bool:
        return bool(config.set_timing_cache(config.create_timing_cache(content), ignore_mismatch=False))

    def parse(self, onnx_model: bytes) -> Any:
        flag = self.trt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        network = self.builder.create_network(1 << int(flag))
        parser = self.trt.module.OnnxParser(network, self.log)
        if not parser.parse(onnx_model):
            raise EngineError(self.failure(_parse_problem([parser.get_error(i) for i in range(parser.num_errors)])))
        _check_inputs([network.get_input(i) for i in range(network.num_inputs)])
        return network

    def configure(self, target: str | None) -> Any:
        module = self.trt.module
        config = self.builder.create_builder_config()
        config.progress_monitor = self.monitor
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, _WORKSPACE_BYTES)
        config.max_aux_streams = 0  # two batches already run at once; more streams would only compete
        config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # for TensorRT's inspector; costs no speed
        if self.trt.user_allocation:
            config.set_flag(module.BuilderFlag.REQUIRE_USER_ALLOCATION)
        if target is not None:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(module.ComputeCapability, target.upper()), 0)
        return config

    def add_profile(self, network: Any, config: Any, profile: Profile) -> None:
        shapes = self.builder.create_optimization_profile()
        for name in _BATCHED_INPUTS:
            # [batch, length]. The length is fixed, so that kernels are chosen for exactly that.
            shapes.set_shape(name, *((batch, profile.length) for batch in (1, profile.best_batch, profile.max_batch)))
        if config.add_optimization_profile(shapes) < 0:
            raise EngineError(self.failure(f"refuses {profile}"))

    def failure(self, what: str) -> str:
        words = self.log.words()
        return f"{self.trt.name} {self.trt.version} {what}" + (f": {words}" if words else "")


def check_half(trt: TensorRT, network: Any) -> None:
    """Raise, naming the layers, unless all matrix products of tokens in a network give FP16.

    Layers after pooling, [batch, dim], are FP32 on purpose. Outer products (of one column and one
    row, as in rotary position tables) are not checked, because they sum nothing.
    """
    half = trt.module.DataType.HALF
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    products = [
        layer
        for layer in layers
        if layer.type == trt.module.LayerType.MATRIX_MULTIPLY and len(layer.get_output(0).shape) > 2
    ]
    wrong = [layer for layer in products if layer.get_output(0).dtype != half and 1 not in _inner(layer)]
    if wrong:
        names = ", ".join(f"{layer.name} ({layer.get_output(0).dtype.name})" for layer in wrong)
        raise EngineError(f"{len(wrong)} of {len(products)} matrix products are not in FP16: {names}")


def _inner(layer: Any) -> tuple[int, ...]:
    """Return the dimension summed over, from the first operand's shape; empty for a vector."""
    shape = tuple(layer.get_input(0).shape)
    return shape[-1:] if len(shape) > 1 else ()


def _check_target(trt: TensorRT, target: str | None) -> None:
    allowed = targets(trt)
    if target is None or target in allowed:
        return
    if not allowed:
        raise EngineError(
            f"{trt.name} builds for this machine's GPU only, not for {target}: pip install tensorrt-rtx-cu13"
        )
    raise EngineError(f"{trt.name} {trt.version} builds for {', '.join(allowed)}, not for {target}")


def _check_inputs(inputs: Sequence[Any]) -> None:
    names = {tensor.name for tensor in inputs}
    if missing := set(_BATCHED_INPUTS) - names:
        raise EngineError(f"the model has no input {', '.join(sorted(missing))}")
    if foreign := names - {*_BATCHED_INPUTS, _SCALAR_INPUT}:
        raise EngineError(f"the model has an input that is never set: {', '.join(sorted(foreign))}")
    if shapes := [tensor.name for tensor in inputs if tensor.is_shape_tensor]:
        raise EngineError(
            f"the values of {', '.join(shapes)} determine shapes, which a TensorRT engine with fixed shapes can't have"
        )


def _parse_problem(errors: Sequence[Any]) -> str:
    nodes = [f"{error.node_operator()} (node {error.node_name() or 'without a name'})" for error in errors]
    operators = list(dict.fromkeys(node for node, error in zip(nodes, errors, strict=True) if error.node_operator()))
    return f"does not take the operators {', '.join(operators)}" if operators else "can't read the model"


def _make_monitor(trt: TensorRT, progress: Callable[[str, int, int], object], cancelled: Callable[[], bool]) -> Any:
    """Make a progress monitor that keeps any exception in `failure`.

    No exception may pass through TensorRT's C++ code.
    """

    class Monitor(trt.module.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.failure: BaseException | None = None
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self._report(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._report(phase_name, step + 1)
            return self.failure is None

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

        def _report(self, phase: str, done: int) -> None:
            try:
                progress(phase, done, self.steps.get(phase, done))
                if self.failure is None and cancelled():
                    self.failure = EngineError("the build was cancelled")
            except BaseException as error:
                self.failure = self.failure or error

    return Monitor()
