"""From a checkpoint to a plan: as `exporter.py`, in FP16, and with engines built for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sbert_infer._util.files import staged
from sbert_infer.artifact.manifest import Manifest
from sbert_infer.artifact.plan_file import EngineFile, write_plan
from sbert_infer.artifact.profiles import Profile, make_profiles
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build import targets
from sbert_infer.backends.tensorrt.build_cache import build
from sbert_infer.backends.tensorrt.versions import TensorRT, installed
from sbert_infer.backends.tensorrt.versions import load as load_tensorrt
from sbert_infer.engine import Engine
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.modules import NormalizeSpec, PoolingSpec
from sbert_infer.export.checkpoint.reader import Loaded, load
from sbert_infer.export.graph.cpu_rewrites import tune
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.graph.trace import convert
from sbert_infer.export.options import ExportOptions, Step
from sbert_infer.export.precision.cpu_graph import cpu_twin
from sbert_infer.export.precision.fp16 import to_half
from sbert_infer.export.precision.fp16_range import refuse_overflow
from sbert_infer.export.verify.candidate import EngineCandidate, GraphCandidate
from sbert_infer.export.verify.parity import MIN_COSINE, Expected, compare, expect
from sbert_infer.export.write import MAX_PROTOBUF_BYTES, check_free, weight_bytes
from sbert_infer.text.tokenizer import Tokenizer

__all__ = ["export_plan"]

_SOME = 512  # of the user's texts are tried for overflow, besides the probe texts


@dataclass(frozen=True)
class _Graphs:
    model: bytes
    cpu: bytes
    fusion: dict[str, int]


def export_plan(source: str | Path, target: Path, options: ExportOptions, step: Step) -> Manifest:
    """Export the checkpoint `source` to the plan `target`, and return its manifest."""
    builds = _choose_builds(options.targets)  # first: a wrong target should not cost minutes
    loaded = load(source, options, step)
    if options.pooling == "kernel":
        _check_kernel_pooling(loaded)
    expected = _check_range(loaded, options, step)
    with step("convert", "fp16 in standard operators, and a twin fused for CPUs", 0):
        graphs = _convert(loaded, options)
        profiles = make_profiles(_lengths(loaded, options), loaded.draft.max_length, options.max_batch_tokens)
    threshold = options.min_cosine or MIN_COSINE["fp16"]
    with step("verify", f"{len(loaded.texts)} texts against eager PyTorch", 2 * len(loaded.texts)) as progress:
        certificate = compare(GraphCandidate(graphs.model, loaded.reference), expected, threshold, progress)
    manifest = replace(loaded.draft, fusion=graphs.fusion, parity=certificate.to_dict())
    engines = {}
    for trt, name in builds:
        kind = EngineFile(trt.name, trt.version, name, gpu="" if trt.any_target else cuda.device_name(0))
        with step("build", f"{trt.name} {trt.version} for {name}, {len(profiles)} profiles", 0) as progress:
            engines[kind] = _build(trt, name, graphs.model, profiles, progress)
    with staged(target) as file, step("save", str(target), 2 * len(loaded.texts)) as progress:
        with file.path.open("r+b") as handle:
            write_plan(
                handle,
                manifest,
                loaded.tokenizer_json,
                model=graphs.model,
                cpu_graph=graphs.cpu,
                engines=engines,
                profiles=profiles,
                pooling=options.pooling,
            )
        for device in ["cpu"] if options.targets is not None or not builds else ["cpu", "cuda"]:
            _verify(file.path, device, expected, threshold, progress)
        check_free(target, options.force)  # again: this took a while
        file.commit()
    return manifest


def _check_range(loaded: Loaded, options: ExportOptions, step: Step) -> Expected:
    """Refuse a model whose numbers FP16 can't hold. The reference's vectors are a by-product."""
    with step("range", "of weights and activations, for FP16", 0), refuse_overflow(loaded.reference):
        loaded.reference.encode(options.calibration[:: max(1, len(options.calibration) // _SOME)])
        return expect(loaded.reference, loaded.texts)


def _convert(loaded: Loaded, options: ExportOptions) -> _Graphs:
    reference = loaded.reference
    half = to_half(reference, token_output=options.pooling == "kernel")
    weights = weight_bytes(half)
    if weights > MAX_PROTOBUF_BYTES:
        size = f"{weights / 1e9:.1f} GB of FP16 weights"
        raise ExportError(f"{loaded.draft.name} has {size}, a plan holds up to 2 GB: export it without --fp16")
    model = ir.to_proto(half).SerializeToString()
    fused = convert(reference)
    fusion = asdict(count_fused(fused, reference.layers, reference.gelu_layers))
    return _Graphs(model, cpu_twin(tune(fused), model).model, fusion)


def _lengths(loaded: Loaded, options: ExportOptions) -> npt.NDArray[np.int64] | None:
    """Tokens of the user's texts, if any are known."""
    if options.lengths:
        return np.array(options.lengths, np.int64)
    if not options.calibration:
        return None
    draft = loaded.draft
    return Tokenizer(loaded.tokenizer_json, draft.max_length, draft.truncation_side)(options.calibration).lengths


def _check_kernel_pooling(loaded: Loaded) -> None:
    checkpoint = loaded.reference.checkpoint
    odd = [type(spec).__name__ for spec in checkpoint.modules if not isinstance(spec, PoolingSpec | NormalizeSpec)]
    if checkpoint.pooling.modes != ("mean",) or not checkpoint.pooling.include_prompt or odd:
        has = ", ".join(["+".join(checkpoint.pooling.modes) + " pooling", *odd])
        raise ExportError(f"--pooling kernel takes the mean and normalises, but {checkpoint.name} has {has}")


def _choose_builds(wanted: object) -> list[tuple[TensorRT, str]]:
    """Which TensorRT builds for which GPU. Those that are not here need TensorRT-RTX."""
    if wanted is None:
        if cuda.driver_problem() is not None:
            return []
        name = cuda.compute_capability(0)
        return [(trt, name) for trt in installed() if not trt.any_target or name in targets(trt)][:1]
    names = list(dict.fromkeys(str(name) for name in wanted)) if isinstance(wanted, list | tuple) else []
    if not names:
        return []
    trt = load_tensorrt("tensorrt_rtx")
    if unknown := [name for name in names if name not in targets(trt)]:
        known = ", ".join(targets(trt))
        raise ExportError(f"{trt.name} {trt.version} can't build for {', '.join(unknown)}; it can for {known}")
    return [(trt, name) for name in names]


def _build(
    trt: TensorRT, name: str, model: bytes, profiles: tuple[Profile, ...], progress: Callable[[int], object]
) -> bytes:
    gpu = name if trt.any_target else f"{cuda.device_name(0)} {name}"
    options = {"target": name if trt.any_target else None, "progress": lambda phase, done, steps: progress(1)}
    return build(trt, model, profiles, gpu, **options)


def _verify(path: Path, device: str, expected: Expected, threshold: float, progress: Callable[[int], object]) -> None:
    """The file as a machine without a GPU opens it and, if an engine was built for this machine's, as this one does."""
    options = {"workers": 1} if device == "cpu" else {}
    with Engine(path, device=device, strict=True, on_truncate="ignore", **options) as engine:
        compare(EngineCandidate(engine), expected, threshold, progress)
