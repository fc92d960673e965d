"""Which backend runs an artifact: the best that the machine allows.

For a plan, in this order:

1. an engine inside it that fits this GPU and this TensorRT;
2. an engine built from the model inside it, on this machine, kept in the user's cache folder;
3. onnxruntime on the GPU;
4. onnxruntime on the CPU, the weights widened to FP32.

Building, and each step from there on, is a warning that says why, or an error if the user is strict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import cuda
from .artifact import Artifact
from .backend import Backend
from .devices import Device, gpu_indices
from .engine_cache import build, cached, engine_key, is_cached
from .errors import EngineError, warn
from .onnx_backend import OnnxBackend
from .onnx_cuda_backend import OnnxCudaBackend
from .onnx_model import FileModel, PlanModel
from .plan import CPU_GRAPH, MODEL, Plan

__all__ = ["BackendOptions", "open_backend"]


@dataclass(frozen=True)
class BackendOptions:
    """What the user of an engine may set."""

    device: Device = None
    strict: bool = False
    workers: int | None = None
    threads: int | None = None
    max_batch_tokens: int | None = None
    cuda_graphs: bool = True


def open_backend(artifact: Artifact, options: BackendOptions) -> Backend:
    """The backend for `artifact`."""
    if isinstance(artifact, Plan):
        return _open_plan(artifact, options)
    model = FileModel(artifact.path, fused=artifact.manifest.fusion.get("attention", 0) > 0)
    gpus = gpu_indices("cpu" if options.device is None else options.device)
    if not gpus:
        return _onnxruntime_cpu(model, options)
    if problem := cuda.driver_problem():
        raise EngineError(f"{artifact.path}: can't run on {options.device}: {problem}")
    return _onnxruntime_cuda(model, gpus, options)


def _open_plan(plan: Plan, options: BackendOptions) -> Backend:
    gpus = gpu_indices("cuda" if options.device is None else options.device)
    if not gpus:  # the user's own choice: no step down
        return _onnxruntime_cpu(PlanModel(plan, CPU_GRAPH), options)
    backend, why = _on_gpu(plan, gpus, options)
    if backend is None and options.device is not None:
        raise EngineError(f"{plan.path}: can't run on {options.device}: {why}")
    if why and options.strict:
        if backend is not None:
            backend.close()
        raise EngineError(f"{plan.path}: no engine inside runs here: {why}")
    backend = backend or _onnxruntime_cpu(PlanModel(plan, CPU_GRAPH), options)
    if why:
        warn(f"{plan.path} runs with {backend.describe()}: {why}")
    return backend


def _on_gpu(plan: Plan, gpus: tuple[int, ...], options: BackendOptions) -> tuple[Backend | None, str]:
    """The best backend on these GPUs, if any, and why it is not an engine from inside the plan or the cache."""
    if problem := cuda.driver_problem():
        return None, problem
    try:
        return _engine_inside(plan, gpus, options), ""
    except EngineError as error:
        reasons = {str(error): None}  # in order, each once
    try:
        backend, built = _engine_built(plan, gpus, options)
        return backend, "; ".join([*reasons, "one was built and kept for the next time"]) if built else ""
    except EngineError as error:
        reasons[str(error)] = None
    try:
        return _onnxruntime_cuda(PlanModel(plan, MODEL), gpus, options), "; ".join(reasons)
    except EngineError as error:
        return None, "; ".join([*reasons, str(error)])


def _engine_inside(plan: Plan, gpus: tuple[int, ...], options: BackendOptions) -> Backend:
    target = _common_target(gpus)
    for trt in _installed():
        for engine in plan.engines:
            if (engine.runtime, engine.version, engine.target) == (trt.name, trt.version, target):
                return _tensorrt(trt, plan.read(engine.name), plan, gpus, options)
    there = ", ".join(f"{engine.runtime} {engine.version} {engine.target}" for engine in plan.engines) or "none"
    here = " or ".join(f"{trt.name} {trt.version}" for trt in _installed())
    raise EngineError(f"it holds no engine for {here} on {target} (it holds {there})")


def _engine_built(plan: Plan, gpus: tuple[int, ...], options: BackendOptions) -> tuple[Backend, bool]:
    """An engine of the first TensorRT that is installed, and whether it was built now or taken from the cache."""
    trt, target = _installed()[0], _common_target(gpus)
    gpu = f"{cuda.device_name(gpus[0])} {target}"
    key = engine_key(plan.members[MODEL][1], trt.name, trt.version, gpu, plan.profiles)
    kept = is_cached(key)
    if not kept and options.strict:
        raise EngineError(f"one would have to be built for {trt.name} {trt.version} on {target}")
    engine = cached(key, lambda: build(trt, plan.read(MODEL), plan.profiles, gpu, device=gpus[0]))
    return _tensorrt(trt, engine, plan, gpus, options), not kept


def _tensorrt(trt: Any, engine: bytes, plan: Plan, gpus: Sequence[int], options: BackendOptions) -> Backend:
    from .tensorrt_backend import TensorRTBackend

    _refuse_cpu_options(options)
    backend = TensorRTBackend(
        trt,
        engine,
        plan.profiles,
        devices=gpus,
        dim=plan.manifest.dim,
        prompt_length=not plan.manifest.include_prompt,
        cuda_graphs=options.cuda_graphs,
        pooler=_pooler(plan),
    )
    limit = backend.max_batch_tokens
    if options.max_batch_tokens is not None and options.max_batch_tokens > limit:
        backend.close()
        raise ValueError(f"max_batch_tokens is at most {limit}, which the engine was built for")
    backend.max_batch_tokens = options.max_batch_tokens or limit
    return backend


def _pooler(plan: Plan) -> Any:
    if plan.pooling == "graph":
        return None
    from .kernel_pooler import KernelPooler

    return KernelPooler(normalize=plan.manifest.normalized)


def _onnxruntime_cuda(model: FileModel | PlanModel, gpus: tuple[int, ...], options: BackendOptions) -> Backend:
    _refuse_cpu_options(options)
    if isinstance(model, PlanModel) and model.plan.pooling != "graph":
        raise EngineError("onnxruntime needs the pooling in the graph, not in a kernel")
    return OnnxCudaBackend(model, gpus, max_batch_tokens=options.max_batch_tokens)


def _onnxruntime_cpu(model: FileModel | PlanModel, options: BackendOptions) -> Backend:
    return OnnxBackend(
        model, workers=options.workers, threads=options.threads, max_batch_tokens=options.max_batch_tokens
    )


def _installed() -> list[Any]:
    from .tensorrt_api import installed

    if found := installed():
        return found
    raise EngineError("TensorRT is not installed (pip install 'sbert-infer[tensorrt]')")


def _common_target(gpus: tuple[int, ...]) -> str:
    targets = {gpu: cuda.compute_capability(gpu) for gpu in gpus}
    if len(set(targets.values())) > 1:
        kinds = ", ".join(f"cuda:{gpu} is {target}" for gpu, target in targets.items())
        raise EngineError(f"the GPUs differ ({kinds}): open an Engine for each kind")
    return targets[gpus[0]]


def _refuse_cpu_options(options: BackendOptions) -> None:
    if options.workers is not None or options.threads is not None:
        raise ValueError("workers and threads are for CPUs; on a GPU set max_batch_tokens")
