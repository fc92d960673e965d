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

from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.cuda_packages import driver_too_old
from sbert_infer.backends.tensorrt.network import check_inputs, check_products, keep_output, parse_problem
from sbert_infer.backends.tensorrt.tensors import input_shape
from sbert_infer.backends.tensorrt.versions import TensorRT
from sbert_infer.errors import EngineError
from sbert_infer.types import Shape

# Part of the cache key: raise it when a change here makes a different TensorRT engine.
BUILD_VERSION = 3

_OLDEST_BF16 = 80


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
    shapes: Sequence[Shape],
    *,
    output: str = SENTENCE,
    precision: str | None = "fp16",
    target: str | None = None,
    device: int = 0,
    timing_cache: bytes = b"",
    progress: Callable[[str, int, int], object] = lambda phase, done, steps: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> BuiltEngine:
    """Build a TensorRT engine with one optimization profile per `Shape`, in this order.

    Args:
        trt: the TensorRT that builds it, and the only version that can run it.
        onnx_model: the model, in standard operators; its types are kept as they are.
        shapes: all shapes that will run; kernels are chosen for exactly these.
        output: the model's output that is kept, `SENTENCE` or `TOKENS`.
        precision: refuse a model whose matrix products are not in this, fp16 or bf16; None takes
            any.
        target: the GPU to build for, one of `targets(trt)`; by default the GPU `device` of this
            machine.
        device: the GPU of this machine to use if no `target` is given.
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
    if precision == "bf16":
        check_bf16(target or cuda.compute_capability(device))
    stop = threading.Event()
    monitor = _make_monitor(trt, progress, lambda: stop.is_set() or cancelled())

    def work() -> BuiltEngine:
        if not trt.any_target:
            cuda.set_device(device)  # applies to the calling thread only
        build = _Build(trt, monitor)
        return build.run(build.parse(onnx_model, output, precision), shapes, target, timing_cache)

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

    def parse(self, onnx_model: bytes, output: str, precision: str | None) -> Any:
        """Return the network of a model, checked, with one output."""
        flag = self.trt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED
        network = self.made(self.builder.create_network(1 << int(flag)))
        parser = self.trt.module.OnnxParser(network, self.log)
        if not parser.parse(onnx_model):
            raise EngineError(self.failure(parse_problem([parser.get_error(i) for i in range(parser.num_errors)])))
        check_inputs(network)
        if precision is not None:
            check_products(self.trt, network, precision)
        keep_output(network, output)
        return network

    def run(self, network: Any, shapes: Sequence[Shape], target: str | None, timing_cache: bytes) -> BuiltEngine:
        """Build the network."""
        config = self.configure(target)
        for shape in shapes:
            self.add_profile(network, config, shape)
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
        cache = config.create_timing_cache(content)  # None if it can't be read at all
        return cache is not None and bool(config.set_timing_cache(cache, ignore_mismatch=False))

    def configure(self, target: str | None) -> Any:
        """Return the builder's settings.

        The workspace has its default, the GPU's whole memory: TensorRT takes what it has fused for
        a single operation, and finds no implementation of it under a limit that it exceeds. So has
        the profiling verbosity: more than layers' names costs latency.
        """
        module = self.trt.module
        config = self.made(self.builder.create_builder_config())
        config.progress_monitor = self.monitor
        config.max_aux_streams = 0  # the slots' batches already run at once; more streams would only compete
        if self.trt.user_allocation:
            config.set_flag(module.BuilderFlag.REQUIRE_USER_ALLOCATION)
        if target is not None:
            config.num_compute_capabilities = 1
            if not config.set_compute_capability(getattr(module.ComputeCapability, target.upper()), 0):
                raise EngineError(self.failure(f"refuses the target {target}"))
        return config

    def add_profile(self, network: Any, config: Any, shape: Shape) -> None:
        """Add an optimization profile that allows `shape` and nothing else."""
        profile = self.made(self.builder.create_optimization_profile())
        try:
            for name in (network.get_input(index).name for index in range(network.num_inputs)):
                profile.set_shape(name, *[input_shape(name, shape)] * 3)  # the least, the best, the largest
            added = config.add_optimization_profile(profile) >= 0
        except RuntimeError:  # raised by set_shape
            added = False
        if not added:
            raise EngineError(self.failure(f"refuses {shape}"))

    def made(self, created: Any) -> Any:
        """Return what TensorRT has created; raise if that is None."""
        if created is None:
            raise EngineError(self.failure("can't start a build"))
        return created

    def failure(self, what: str) -> str:
        words = self.log.words()
        return f"{self.trt.name} {self.trt.version} {what}" + (f": {words}" if words else "")


def _check_target(trt: TensorRT, target: str | None) -> None:
    allowed = targets(trt)
    if target is None or target in allowed:
        return
    if not allowed:
        raise EngineError(
            f"{trt.name} builds for this machine's GPU only, not for {target}: pip install tensorrt-rtx-cu13"
        )
    raise EngineError(f"{trt.name} {trt.version} builds for {', '.join(allowed)}, not for {target}")


def check_bf16(target: str) -> None:
    """Raise unless GPUs of this compute capability have BF16."""
    if int(target.removeprefix("sm")) < _OLDEST_BF16:
        raise EngineError(f"{target} has no BF16, which GPUs have from sm{_OLDEST_BF16} on: export the model to FP16")


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
