"""The choice of a backend for an artifact: the best one that works on this machine.

For a plan, in this order:

1. a TensorRT engine inside it for this GPU and this version of TensorRT;
2. a TensorRT engine built from the model inside it, on this machine, kept in the user's cache;
3. onnxruntime on the GPU, with its own fused operators;
4. onnxruntime on the CPU, with the weights widened to FP32.

An ONNX model in BF16 runs with OpenVINO, else in FP32 with onnxruntime.

If a TensorRT engine has to be built, for steps 3 and 4, and for a BF16 model in FP32, a warning
says why; with `strict`, that is an error. So it is with one that gives wrong vectors here
(`BackendOptions.accept`), instead of which the next one is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sbert_infer.artifact.manifest import SENTENCE, TOKENS, Artifact
from sbert_infer.artifact.onnx_file import Part
from sbert_infer.artifact.plan_file import CPU_GRAPH, MODEL, EngineFile, Plan
from sbert_infer.backends.base import Backend
from sbert_infer.backends.devices import Device, gpu_indices
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.backends.onnxruntime_cuda import OnnxCudaBackend
from sbert_infer.backends.onnxruntime_session import FileModel, PlanModel, cuda_model
from sbert_infer.backends.openvino import OpenVinoBackend
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.backend import TensorRTBackend
from sbert_infer.backends.tensorrt.build import BUILD_VERSION
from sbert_infer.backends.tensorrt.build_cache import build, cached, engine_key, forget, kept
from sbert_infer.backends.tensorrt.cuda_packages import driver_too_old
from sbert_infer.backends.tensorrt.kernel_pooler import KernelPooler
from sbert_infer.backends.tensorrt.loaded_engine import Interface, LoadError
from sbert_infer.backends.tensorrt.versions import TensorRT, installed, why_none
from sbert_infer.errors import EngineError, WrongVectorsError, warn
from sbert_infer.text.packing import Packer

# The choices, as `BackendOptions.passed_over` names them.
READY = "a TensorRT engine that is ready"
_GPU = "a GPU"
_TENSORRT = "TensorRT"
_CUDA = "onnxruntime on the GPU"
OPENVINO = "OpenVINO in BF16"

WRONG_CURE = "export it again, or update what runs it; sbert-verify tells more"

# Called with each better choice that is not taken, and why, in that order; with `READY` before a
# TensorRT engine is built.
PassedOver = Callable[[str, str], object]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendOptions:
    """Options for running a model that users of an engine can set."""

    device: Device = None
    strict: bool = False
    workers: int | None = None
    threads: int | None = None
    max_batch_tokens: int | None = None
    cuda_graphs: bool = True
    build: bool = True  # build a TensorRT engine if none fits; else raise `WouldBuildError`
    passed_over: PassedOver = lambda choice, why: None
    accept: Callable[[Backend], object] = lambda backend: None  # raises `EngineError` for one not to be used


class WouldBuildError(EngineError):
    """A TensorRT engine would have to be built, and `BackendOptions.build` forbids it."""


def open_backend(artifact: Artifact, options: BackendOptions) -> Backend:
    """Open the best backend for `artifact`."""
    try:
        return _open_plan(artifact, options) if isinstance(artifact, Plan) else _open_onnx(artifact, options)
    except WrongVectorsError as error:
        what = str(error).removeprefix(f"{artifact.path}: ")
        raise WrongVectorsError(f"{artifact.path}: {what}; {WRONG_CURE}") from error


def _open_onnx(artifact: Artifact, options: BackendOptions) -> Backend:
    fused, part = artifact.manifest.fusion.get("attention", 0) > 0, artifact if isinstance(artifact, Part) else None
    model = FileModel(artifact.path, fused, part)
    gpus = gpu_indices("cpu" if options.device is None else options.device)
    if not gpus:
        if options.device is None:
            other = "" if artifact.manifest.precision == "int8" else 'give device="cuda", or '
            options.passed_over(_CUDA, f"an ONNX file runs on the CPU: {other}export the model with --fp16")
        if artifact.manifest.precision == "bf16":
            return _bf16_cpu(artifact, model, options)
        return _onnxruntime_cpu(model, options)
    if artifact.manifest.precision == "int8":  # onnxruntime would silently run its products on the CPU
        raise EngineError(f"{artifact.path}: 8-bit is for CPUs; for a GPU export it with --fp16")
    if problem := cuda.driver_problem():
        raise EngineError(f"{artifact.path}: can't run on {options.device}: {problem}")
    return _onnxruntime_cuda(model, gpus, options)


def _open_plan(plan: Plan, options: BackendOptions) -> Backend:
    gpus = gpu_indices("cuda" if options.device is None else options.device)
    if not gpus:  # chosen by the user, so there is nothing to warn about
        return _onnxruntime_cpu(PlanModel(plan, CPU_GRAPH), options)
    backend, why = _on_gpu(plan, gpus, options)
    if why and backend is None and options.device is not None:
        raise _refusal(f"{plan.path}: can't run on {options.device}: ", why)
    if why and options.strict:
        if backend is not None:
            backend.close()
        raise _refusal(f"{plan.path}: no TensorRT engine inside runs here: ", why)
    backend = backend or _onnxruntime_cpu(PlanModel(plan, CPU_GRAPH), options)
    if why:
        warn(f"{plan.path} runs with {backend.describe()}: {why}")
    return backend


def _refusal(what: str, *why: EngineError) -> EngineError:
    """Return an error with these reasons; if one of them is wrong vectors, it is such an error."""
    kind = WrongVectorsError if any(isinstance(each, WrongVectorsError) for each in why) else EngineError
    return kind(what + "; ".join(map(str, why)))


def _on_gpu(plan: Plan, gpus: tuple[int, ...], options: BackendOptions) -> tuple[Backend | None, EngineError | None]:
    """Return the best backend on these GPUs, or None, and the reason for a warning, if any.

    No warning is needed for a TensorRT engine from the plan or from the cache.
    """
    if problem := cuda.driver_problem():
        options.passed_over(_GPU, f"{problem}: {cuda.DRIVER_CURE}")
        return None, EngineError(problem)
    _refuse_cpu_options(options)
    limit = _packer(plan).max_tokens
    if options.max_batch_tokens is not None and options.max_batch_tokens > limit:
        raise ValueError(f"max_batch_tokens is at most {limit}, the size that its TensorRT engines are built for")
    try:
        backend, built = _tensorrt(plan, gpus, options)
        return backend, EngineError(built) if built else None
    except WouldBuildError:
        raise
    except EngineError as error:
        why = error
        options.passed_over(_TENSORRT, str(error))
    try:
        return _onnxruntime_cuda(cuda_model(plan), gpus, options), why
    except EngineError as error:
        options.passed_over(_CUDA, str(error))
        return None, _refusal("", why, error)


def _tensorrt(plan: Plan, gpus: tuple[int, ...], options: BackendOptions) -> tuple[Backend, str]:
    """Return a TensorRT backend and, if its engine had to be built, the reason."""
    available = _installed()
    cuda.require_bindings()
    if problem := driver_too_old("cuda-bindings"):
        raise EngineError(problem)
    target, model = _kind(gpus)
    pooler, why = _pooler(plan)

    def load(trt: TensorRT, engine: bytes) -> Backend:
        return _load(trt, engine, plan, gpus, options, pooler)

    here = " or ".join(f"{trt.name} {trt.version}" for trt in available)
    there = ", ".join(engine.describe() for engine in plan.engines) or "none"
    usable = () if why else plan.engines
    why = why or f"it holds no engine for {here} on {model or target} (it holds {there})"
    for trt in available:
        for engine in usable:
            wanted = EngineFile(trt.name, trt.version, target, "" if trt.any_target else model)
            if engine == wanted:
                try:
                    return load(trt, plan.read(engine.name)), ""
                except LoadError as error:
                    why = str(error)
    trt = available[0]
    shapes, output = plan.rows.shapes, SENTENCE if pooler is None else TOKENS
    key = engine_key(BUILD_VERSION, plan.members[MODEL][1], trt.name, trt.version, target, model, shapes, output)
    if (engine_bytes := kept(key)) is not None:
        try:
            return load(trt, engine_bytes), ""
        except LoadError as error:
            forget(key)
            why = str(error)
    options.passed_over(READY, why)
    if options.strict:
        raise EngineError(f"{why}; one would have to be built")
    if not options.build:
        raise WouldBuildError(f"{why}; one is built at first use, which may take minutes, and cached")
    logger.info("building a TensorRT engine for %s, which may take minutes", model or target)
    how = {"output": output, "precision": plan.manifest.precision, "device": gpus[0]}
    built = cached(key, lambda: build(trt, plan.read(MODEL), shapes, f"{target} {model}", **how))
    return load(trt, built), f"{why}; one was built and cached for the next time"


def _load(
    trt: TensorRT,
    engine: bytes,
    plan: Plan,
    gpus: tuple[int, ...],
    options: BackendOptions,
    pooler: KernelPooler | None,
) -> Backend:
    backend = TensorRTBackend(
        trt,
        engine,
        _packer(plan),
        _interface(plan, pooler),
        devices=gpus,
        cuda_graphs=options.cuda_graphs,
        pooler=pooler,
    )
    backend.max_batch_tokens = options.max_batch_tokens or backend.max_batch_tokens
    return _accepted(backend, options)


def _accepted(backend: Backend, options: BackendOptions) -> Backend:
    """Return `backend`; close it if it is not to be used."""
    try:
        options.accept(backend)
    except BaseException:
        backend.close()
        raise
    return backend


def _packer(plan: Plan) -> Packer:
    return Packer(plan.rows.shapes, plan.rows.hidden)


def _interface(plan: Plan, pooler: KernelPooler | None) -> Interface:
    inputs, dim = plan.rows.inputs, plan.manifest.dim
    if pooler is None:
        return Interface(inputs, SENTENCE, dim)
    return Interface(inputs, TOKENS, dim, "BF16" if pooler.bf16 else "HALF")


def _pooler(plan: Plan) -> tuple[KernelPooler | None, str]:
    """Return the kernel, if the plan is for it; if it can't be used, the reason.

    A TensorRT engine that pools in the graph can then be built from the same model.
    """
    if plan.pooling == "graph":
        return None, ""
    try:
        return KernelPooler(normalize=plan.manifest.normalized, bf16=plan.manifest.precision == "bf16"), ""
    except EngineError as error:
        return None, str(error)


def _onnxruntime_cuda(model: FileModel | PlanModel, gpus: tuple[int, ...], options: BackendOptions) -> Backend:
    _refuse_cpu_options(options)
    return _accepted(OnnxCudaBackend(model, gpus, max_batch_tokens=options.max_batch_tokens), options)


def _onnxruntime_cpu(model: FileModel | PlanModel, options: BackendOptions) -> Backend:
    how = {"workers": options.workers, "threads": options.threads, "max_batch_tokens": options.max_batch_tokens}
    return _accepted(OnnxBackend(model, **how), options)


def _bf16_cpu(artifact: Artifact, model: FileModel, options: BackendOptions) -> Backend:
    """Return OpenVINO in BF16 or, if that can't run here, onnxruntime in FP32, with a warning."""
    how = {"workers": options.workers, "threads": options.threads, "max_batch_tokens": options.max_batch_tokens}
    try:
        return _accepted(OpenVinoBackend(artifact, **how), options)
    except EngineError as error:
        if options.strict:
            raise _refusal(f"{artifact.path}: can't run in BF16: ", error) from error
        options.passed_over(OPENVINO, str(error))
        backend = _onnxruntime_cpu(model, options)
        warn(f"{artifact.path} runs in FP32 with {backend.describe()}: {error}")
        return backend


def _installed() -> list[TensorRT]:
    """Return every TensorRT that is installed and that the driver can run."""
    found = installed()
    problems = {trt.name: driver_too_old(trt.name) for trt in found}
    if usable := [trt for trt in found if problems[trt.name] is None]:
        return usable
    raise EngineError(next(filter(None, problems.values()), None) or why_none())


def _kind(gpus: tuple[int, ...]) -> tuple[str, str]:
    """Return the compute capability and model of these GPUs; raise if they differ."""
    if missing := [gpu for gpu in gpus if gpu >= cuda.device_count()]:
        raise EngineError(f"there is no cuda:{missing[0]}: this machine has {cuda.device_count()} GPUs")
    kinds = {gpu: (cuda.compute_capability(gpu), cuda.device_name(gpu)) for gpu in gpus}
    if len(set(kinds.values())) > 1:
        there = ", ".join(f"cuda:{gpu} is {model} ({target})" for gpu, (target, model) in kinds.items())
        raise EngineError(f"the GPUs differ ({there}): open an Engine for each kind")
    return kinds[gpus[0]]


def _refuse_cpu_options(options: BackendOptions) -> None:
    if options.workers is not None or options.threads is not None:
        raise ValueError("workers and threads are for CPUs; on a GPU set max_batch_tokens")
