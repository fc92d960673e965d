"""The writer of plans: a graph of packed rows, two for onnxruntime, and TensorRT engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from sbert_infer._util.files import staged
from sbert_infer.artifact.manifest import SENTENCE, TOKENS, Manifest
from sbert_infer.artifact.plan_file import MODEL, EngineFile, PackedRowsModel, write_plan
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build import check_bf16, targets
from sbert_infer.backends.tensorrt.build_cache import build
from sbert_infer.backends.tensorrt.versions import TensorRT, installed
from sbert_infer.backends.tensorrt.versions import load as load_tensorrt
from sbert_infer.errors import ExportError
from sbert_infer.export.families.sentence import SentenceEncoder
from sbert_infer.export.graph.cpu_rewrites import tune
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.graph.trace import convert
from sbert_infer.export.options import ExportOptions, Progress, Step
from sbert_infer.export.precision.borrowed_weights import inline_weights
from sbert_infer.export.precision.cpu_graph import make_cpu_graph
from sbert_infer.export.precision.cuda_graph import make_cuda_graph
from sbert_infer.export.precision.fp16 import to_half
from sbert_infer.export.precision.fp16_range import refuse_overflow
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import Candidate, EngineCandidate, GraphCandidate, open_half
from sbert_infer.export.verify.packed_candidate import MIN_SAME, PackedCandidate, cosine_among_others
from sbert_infer.export.verify.parity import (
    MIN_COSINE_OF_PLANS,
    Bounds,
    Certificate,
    Expected,
    compare,
    refusing_failures,
)
from sbert_infer.export.write import MAX_PROTOBUF_BYTES, check_free, weight_bytes
from sbert_infer.text.shapes import choose_shapes
from sbert_infer.text.tokenizer import Tokenizer

_SOME = 512  # of the user's texts are run to find overflows, besides the probe texts


@dataclass(frozen=True)
class _Graphs:
    model: bytes
    inputs: tuple[str, ...]  # of `model`
    cpu: bytes
    cuda: bytes | None  # none in BF16, for which onnxruntime has no attention on CUDA
    fusion: dict[str, int]


class PlanWriter:
    """Converts a sentence encoder to a plan."""

    def __init__(self, options: ExportOptions, step: Step) -> None:
        self._options, self._step = options, step
        self._builds = _choose_builds(options.targets)  # first: a wrong target should not cost minutes
        for _, name in self._builds if options.bf16 else ():
            check_bf16(name)
        self._bounds = Bounds.everywhere(options.min_cosine or MIN_COSINE_OF_PLANS[options.precision])

    def write(self, model: SentenceEncoder, target: Path) -> Manifest:
        """Certify the graph, build TensorRT engines from it, write and certify the plan."""
        options = self._options
        graphs = self._convert(model)
        rows, certificate = self._certify_graph(model, graphs)
        draft = replace(model.draft, precision=options.precision, canaries=model.canaries())
        draft = replace(draft, max_positions=None)  # the rows end at the model's own limit
        manifest = replace(draft, fusion=graphs.fusion, parity=asdict(certificate))
        engines = self._build_engines(graphs, rows)
        with staged(target) as file, self._step("save", str(target), 2 * model.work) as progress:
            with file.path.open("r+b") as handle:
                write_plan(
                    handle,
                    manifest,
                    model.tokenizer_json,
                    model=graphs.model,
                    cpu_graph=graphs.cpu,
                    cuda_graph=graphs.cuda,
                    engines=engines,
                    rows=rows,
                    pooling=options.pooling,
                )
            self._certify_file(file.path, model.expected, progress)
            check_free(target, options.force)  # again: this took a while
            file.commit()
        return manifest

    @contextmanager
    def watch(self, reference: Reference) -> Iterator[None]:
        """Refuse numbers that FP16 can't hold, also among those of texts encoded meanwhile."""
        if self._options.bf16:  # which has the range of FP32
            yield
            return
        texts = self._options.calibration
        with refuse_overflow(reference):
            reference.encode(texts[:: max(1, len(texts) // _SOME)])
            yield

    def _convert(self, model: SentenceEncoder) -> _Graphs:
        """Convert to 16 bits, and to a graph for CPUs."""
        options, reference = self._options, model.reference
        with self._step("convert", f"{options.precision} in standard operators, and graphs fused for onnxruntime", 0):
            half = to_half(reference, torch.bfloat16 if options.bf16 else torch.float16)
            _check_size(half, model.checkpoint.name)
            inputs = tuple(str(value.name) for value in half.graph.inputs)
            content = ir.to_proto(half).SerializeToString()
            fused = model.trace()
            fusion = asdict(count_fused(fused, reference.layers, reference.gelu_layers))
            dtype = ir.DataType.BFLOAT16 if options.bf16 else ir.DataType.FLOAT16
            cpu = make_cpu_graph(tune(fused), content, dtype)
            cuda_graph = (
                None if options.bf16 else make_cuda_graph(convert(reference, token_output=True, cuda=True), content)
            )
        return _Graphs(content, inputs, cpu, cuda_graph, fusion)

    def _certify_graph(self, model: SentenceEncoder, graphs: _Graphs) -> tuple[PackedRowsModel, Certificate]:
        """Compare the graphs, their rounding emulated, before engines are built from one."""
        with refusing_failures():
            session = open_half(graphs.model)
            same = cosine_among_others(session, model.reference)
        packed = same >= MIN_SAME[self._options.precision]
        rows = self._choose_rows(model, graphs, same, packed=packed)
        candidates: list[Candidate] = [PackedCandidate(session, model.reference, packed=packed)]
        if graphs.cuda is not None:
            whole = inline_weights(graphs.cuda, {MODEL: graphs.model}).SerializeToString()
            candidates.append(GraphCandidate(open_half(whole), model.reference))
        what = f"{len(model.probes)} {model.unit} against eager PyTorch"
        with self._step("verify", what, 2 * model.work * len(candidates)) as progress:
            found = [compare(candidate, model.expected, self._bounds, progress) for candidate in candidates]
        return rows, found[0]

    def _choose_rows(self, model: SentenceEncoder, graphs: _Graphs, same: float, *, packed: bool) -> PackedRowsModel:
        """Choose the shapes that run on a GPU, and say so if texts can't be packed, and why."""
        config: Any = model.reference.encoder.config
        longest, most = model.draft.max_length, self._options.max_batch_tokens
        shapes = choose_shapes(_lengths(model, self._options), longest, config.hidden_size, most, packed=packed)
        lengths = ", ".join(map(str, sorted({shape.length for shape in shapes})))
        alone = f"one text in each, since this model's texts can't share a row: cosine {same:.6f} to the text alone"
        each = "packed" if packed else alone
        with self._step("rows", f"of {lengths} tokens, {each}", 0):
            return PackedRowsModel(graphs.inputs, config.hidden_size, shapes)

    def _build_engines(self, graphs: _Graphs, rows: PackedRowsModel) -> dict[EngineFile, bytes]:
        engines = {}
        for trt, name in self._builds:
            kind = EngineFile(trt.name, trt.version, name, gpu="" if trt.any_target else cuda.device_name(0))
            what = f"{trt.name} {trt.version} for {name}, {len(rows.shapes)} shapes"
            with self._step("build", what, 0) as progress:
                engines[kind] = self._build(trt, name, graphs.model, rows, progress)
        return engines

    def _build(self, trt: TensorRT, name: str, model: bytes, rows: PackedRowsModel, progress: Progress) -> bytes:
        gpu = name if trt.any_target else f"{cuda.device_name(0)} {name}"
        options = {
            "output": SENTENCE if self._options.pooling == "graph" else TOKENS,
            "precision": self._options.precision,
            "target": name if trt.any_target else None,
            "progress": lambda phase, done, steps: progress(1),
        }
        return build(trt, model, rows.shapes, gpu, **options)

    def _certify_file(self, path: Path, expected: Expected, progress: Progress) -> None:
        """Compare the plan as opened without a GPU, and with one if it was built for it."""
        here = self._options.targets is None and self._builds
        for device in ["cpu", "cuda"] if here else ["cpu"]:
            options = {"workers": 1} if device == "cpu" else {}
            with closing(EngineCandidate(path, device=device, strict=True, **options)) as candidate:
                compare(candidate, expected, self._bounds, progress)


def _check_size(half: ir.Model, name: str) -> None:
    weights = weight_bytes(half)
    if weights > MAX_PROTOBUF_BYTES:
        size = f"{weights / 1e9:.1f} GB of weights in 16 bits"
        raise ExportError(f"{name} has {size}, a plan holds up to 2 GB: export it without --fp16")


def _lengths(model: SentenceEncoder, options: ExportOptions) -> npt.NDArray[np.int64] | None:
    """Token counts of the user's texts, if any are known."""
    if options.lengths:
        return np.array(options.lengths, np.int64)
    if not options.calibration:
        return None
    draft = model.draft
    return Tokenizer(model.tokenizer_json, draft.max_length, draft.truncation_side)(options.calibration).lengths


def _choose_builds(wanted: Sequence[str] | None) -> list[tuple[TensorRT, str]]:
    """Which TensorRT builds for which GPU. GPUs of other machines need TensorRT-RTX."""
    if wanted is None:
        if cuda.driver_problem() is not None:
            return []
        name = cuda.compute_capability(0)
        return [(trt, name) for trt in installed() if not trt.any_target or name in targets(trt)][:1]
    names = list(dict.fromkeys(wanted))
    if not names:
        return []
    trt = load_tensorrt("tensorrt_rtx")
    if unknown := [name for name in names if name not in targets(trt)]:
        known = ", ".join(targets(trt))
        raise ExportError(f"{trt.name} {trt.version} can't build for {', '.join(unknown)}; it can for {known}")
    return [(trt, name) for name in names]
