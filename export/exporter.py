"""An export: read a checkpoint, load its reference, convert it, certify the result, write it."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import cast

import onnx_ir as ir

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.backends.openvino_install import openvino_version, why_no_bf16
from sbert_infer.errors import ExportError, SbertInferWarning
from sbert_infer.export.checkpoint.hub import locate
from sbert_infer.export.checkpoint.modules_json import Routes, is_static, read_routes
from sbert_infer.export.families.cross_encoder.family import CrossEncoder
from sbert_infer.export.families.family import Family
from sbert_infer.export.families.multi_vector.family import MultiVectorEncoder
from sbert_infer.export.families.sentence import SentenceEncoder
from sbert_infer.export.families.sparse import SparseEncoder
from sbert_infer.export.graph.cpu_rewrites import tune
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.options import ExportOptions, Step, default_output, silent
from sbert_infer.export.plan_exporter import PlanWriter
from sbert_infer.export.precision.bf16 import to_bf16
from sbert_infer.export.precision.int8 import quantize
from sbert_infer.export.verify.parity import Bounds
from sbert_infer.export.write import check_free, check_target, join, stage

__all__ = ["ExportOptions", "default_output", "export", "export_all"]

FAMILIES: tuple[type[Family], ...] = (CrossEncoder, MultiVectorEncoder, SparseEncoder, SentenceEncoder)


def export(
    source: str | Path, target: str | Path, options: ExportOptions | None = None, *, step: Step = silent
) -> Manifest:
    """Export the checkpoint `source` to the artifact `target` and return its manifest.

    `options` with FP16 give a plan, otherwise an ONNX model. Nothing is written unless the
    artifact's vectors are those of the eager model; see `Manifest.parity`.
    """
    ((_, manifest),) = export_all(source, [(Path(target), options or ExportOptions())], step=step)
    return manifest


def export_all(
    source: str | Path, wanted: Sequence[tuple[Path, ExportOptions]], *, step: Step = silent
) -> Iterator[tuple[Path, Manifest]]:
    """Export `source` to several artifacts, whose options differ in the precision only.

    The checkpoint is loaded once, and the eager model runs once. Yields each artifact's path and
    manifest when it has been written; one that fails raises, and those before it stay.
    """
    for target, options in wanted:
        check_target(target, options.force)
    path = locate(str(source), wanted[0][1].trust_remote_code)
    if wanted[0][1].route is None and (routes := read_routes(path)) is not None:
        yield from _export_routes(source, path, wanted, routes, step)
        return
    plan_writers = {target: PlanWriter(options, step) for target, options in wanted if options.fp16}
    with step("load", str(source), 0):
        model = _read(source, wanted[0][1])
        for _, options in wanted:
            model.check_options(options)
        model.load()
    with step("validate", model.description, 0):
        model.prepare()
    with ExitStack() as stack:
        what = f"{len(model.probes)} {model.unit} in eager PyTorch"
        progress = stack.enter_context(step("reference", what, model.work))
        for writer in plan_writers.values():
            stack.enter_context(writer.watch(cast(SentenceEncoder, model).reference))
        model.expect(progress)
    graphs = _Graphs(model)
    for target, options in wanted:
        if options.fp16:
            yield target, plan_writers[target].write(cast(SentenceEncoder, model), target)  # others refuse FP16
        else:
            yield target, _write_onnx(model, graphs, options, target, step)


def _export_routes(
    source: str | Path, path: Path, wanted: Sequence[tuple[Path, ExportOptions]], routes: Routes, step: Step
) -> Iterator[tuple[Path, Manifest]]:
    """Export each route as a model of its own, certificate included, and put them into one file."""
    if any(options.fp16 for _, options in wanted):
        raise ExportError("--fp16 takes one route at a time: --route query, --route document, each with -o")
    with tempfile.TemporaryDirectory(prefix=".routes.", dir=wanted[0][0].parent) as folder:
        files = {route: [Path(folder, f"{route}{i}.onnx") for i in range(len(wanted))] for route in astuple(routes)}
        for route, targets in files.items():
            each = [replace(options, route=route) for _, options in wanted]
            if is_static(path, route):  # a table has no other precision
                each = [replace(options, int8=False, bf16=False, calibration=()) for options in each]
            for _ in export_all(source, list(zip(targets, each, strict=True)), step=_named(step, route)):
                pass
        for (target, options), *parts in zip(wanted, *files.values(), strict=True):
            with step("save", f"{target}, with both routes", 0):
                manifest = join(dict(zip(files, parts, strict=True)), target, options.force)
            yield target, manifest


def _named(step: Step, route: str) -> Step:
    """The steps of one route, with its name instead of that of a temporary file."""
    return lambda name, what, total: step(name, f"{route} route" + (f": {what}" if name != "save" else ""), total)


def _read(source: str | Path, options: ExportOptions) -> Family:
    """Read the checkpoint as the first family that recognises it."""
    path = locate(str(source), options.trust_remote_code)
    family = next(family for family in FAMILIES if family.recognises(path, options.route))
    return family.read(source, options)


class _Graphs:
    """The graphs of a model, each traced when it is first asked for. Copies share the weights."""

    def __init__(self, model: Family) -> None:
        self._model = model
        self._traced: dict[bool, ir.Model] = {}

    def copy(self, *, portable: bool) -> ir.Model:
        """A graph that may be changed: of standard operators, or fused for onnxruntime."""
        if portable not in self._traced:
            self._traced[portable] = self._model.trace(portable=portable)
        return self._traced[portable].clone()


def _write_onnx(model: Family, graphs: _Graphs, options: ExportOptions, target: Path, step: Step) -> Manifest:
    """Convert `model`, compare it with the reference, and put it in place."""
    how = {"fp32": "portable" if options.portable else "fused", "bf16": "bf16, portable", "int8": "int8, fused"}
    with step("convert", how[options.precision], 0):
        graph = graphs.copy(portable=options.standard)
        fused = count_fused(graph, model.reference.layers, model.reference.gelu_layers)
        if options.int8:
            quantize(graph, model.calibration(options.calibration))
        elif options.bf16:
            to_bf16(graph)
        elif not options.portable:
            tune(graph)
    draft = replace(model.draft, precision=options.precision, fusion=asdict(fused))
    if options.bf16 and why_no_bf16() is None:  # the certificate is then that of OpenVINO, else that of FP32
        draft = replace(draft, versions={**draft.versions, "openvino": str(openvino_version())})
    bounds = Bounds.of(options.precision, options.min_cosine)
    with stage(graph, draft, model.tokenizer_json, target) as artifact:
        what = f"{len(model.probes)} {model.unit} against eager PyTorch"
        with step("verify", what, 2 * model.work) as progress, warnings.catch_warnings():
            if options.bf16:  # that it does not run here, which the report says
                warnings.simplefilter("ignore", SbertInferWarning)
            certificate = model.certify(artifact.path, options.precision, bounds, progress)
        with step("save", str(target), 0):
            check_free(target, options.force)  # again: this took a while
            return artifact.commit(replace(draft, parity=asdict(certificate), canaries=model.canaries()))
