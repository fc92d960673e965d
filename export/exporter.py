"""An export: read a checkpoint, load its reference, convert it, certify the result, write it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.backends.openvino_install import openvino_version
from sbert_infer.errors import ExportError, ParityError, SbertInferWarning
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
from sbert_infer.export.precision.int8 import Rounded, quantize, round_products, rounding_work
from sbert_infer.export.precision.keep_back import AIM, keep_back, most_kept
from sbert_infer.export.verify.parity import Bounds
from sbert_infer.export.write import check_free, check_target, join, stage, staging_folder

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
    manifest when it has been written. A precision that is too coarse costs only its own file: the
    `ParityError` comes after the others.
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
    with _refusals() as refused:
        for target, options in wanted:
            write: Callable[[], Manifest]
            if options.fp16:  # sentence encoders only: others refuse FP16
                write = partial(plan_writers[target].write, cast(SentenceEncoder, model), target)
            else:
                write = partial(_write_onnx, model, graphs, options, target, step)
            if manifest := _unless_refused(write, refused):
                yield target, manifest


@contextmanager
def _refusals() -> Iterator[list[ParityError]]:
    """Raise the errors that were put into this list, at the end."""
    refused: list[ParityError] = []
    yield refused
    if refused:
        raise refused[0] if len(refused) == 1 else ParityError("\n".join(map(str, refused)))


def _unless_refused(write: Callable[[], Manifest], refused: list[ParityError]) -> Manifest | None:
    """Write an artifact; if its precision is too coarse, note that in `refused`."""
    try:
        return write()
    except ParityError as error:
        refused.append(error)
        return None


def _export_routes(
    source: str | Path, path: Path, wanted: Sequence[tuple[Path, ExportOptions]], routes: Routes, step: Step
) -> Iterator[tuple[Path, Manifest]]:
    """Export each route as a model of its own, certificate included, and put them into one file.

    Nothing is written before all precisions of both routes are done. A precision that is too coarse
    for one route costs only its own file.
    """
    if any(options.fp16 for _, options in wanted):
        raise ExportError("--fp16 takes one route at a time: --route query, --route document, each with -o")
    if all(is_static(path, route) for route in astuple(routes)) and any(one.precision != "fp32" for _, one in wanted):
        raise ExportError("both routes are tables, with no layers to compute: leave out --int8 and --bf16")
    with _refusals() as refused, staging_folder(Path(os.path.realpath(wanted[0][0]))) as folder:
        files = {route: [Path(folder, f"{route}{i}.onnx") for i in range(len(wanted))] for route in astuple(routes)}
        for route, targets in files.items():
            each = [replace(options, route=route) for _, options in wanted]
            if is_static(path, route):  # a table has no other precision
                each = [replace(options, int8=False, bf16=False, calibration=()) for options in each]
            try:
                for _ in export_all(source, list(zip(targets, each, strict=True)), step=_named(step, route)):
                    pass
            except ParityError as error:
                refused.append(ParityError(f"{route} route: {error}"))
        for (target, options), *parts in zip(wanted, *files.values(), strict=True):
            if all(part.exists() for part in parts):
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

    def weight(self, name: str) -> npt.NDArray[np.float32]:
        """A constant of the fused graph."""
        tensor = self._traced[False].graph.initializers[name].const_value
        assert tensor is not None  # noqa: S101
        return tensor.numpy()


def _write_onnx(model: Family, graphs: _Graphs, options: ExportOptions, target: Path, step: Step) -> Manifest:
    """Convert `model`, compare it with the reference, and put it in place."""
    how = {"fp32": "portable" if options.portable else "fused", "bf16": "bf16, portable", "int8": "fused"}
    with step("convert", how[options.precision], 0):
        graph = graphs.copy(portable=options.standard)
        fused = count_fused(graph, model.reference.layers, model.reference.gelu_layers)
        if options.bf16:
            to_bf16(graph)
        elif options.precision == "fp32" and not options.portable:
            tune(graph)
    draft = replace(model.draft, precision=options.precision, fusion=asdict(fused))
    if options.int8:
        return _write_int8(model, graphs, options, partial(_write, model, draft, options, target, step), step)
    try:
        bounds = Bounds.of(options.precision, options.min_cosine)
        return _write(model, draft, options, target, step, graph, bounds)
    except ParityError as error:
        if not options.bf16 or not error.worst:
            raise
        advice = "take FP32, or accept less with --min-cosine"
        raise ParityError(f"BF16 is too coarse for this model: {advice}. In BF16, {error}") from error


def _write_int8(
    model: Family, graphs: _Graphs, options: ExportOptions, write: Callable[..., Manifest], step: Step
) -> Manifest:
    """Round the products to 8 bits, but for those that cost too much, and `write` the graph.

    The fewest are kept in FP32 that reach `AIM`, or what the user asks for. If a quarter of them do
    not reach it, they stay, and the bound has to be reached, for which half of them may be kept.
    """
    graph, calibration = graphs.copy(portable=False), model.calibration(options.calibration)
    with step("quantize", "to 8 bits", rounding_work(graph, calibration)) as progress:
        rounded = round_products(graph, calibration, progress)
        quantize(graph, rounded)
    kept: list[int] = []
    worst: list[Any] = []
    while True:
        aims = options.min_cosine is None and len(kept) < most_kept(rounded, for_aim=True)
        bounds = Bounds.of("int8", AIM if aims else options.min_cosine)
        try:
            return write(graph, bounds, _weight_names(model, graphs, rounded, kept))
        except ParityError as error:
            if not error.worst:  # it does not run at all, or the checkpoint itself gives NaN
                raise
            if len(kept) >= most_kept(rounded):
                raise _refusal(error, len(kept), len(rounded.groups)) from error
            worst, excess = [*error.worst, *worst], error.excess
        inputs = [batch for probe in dict.fromkeys(worst) for batch in model.inputs([probe])]
        with step("keep", "in FP32 what costs the most in 8 bits", len(rounded.groups)) as progress:
            most = most_kept(rounded, for_aim=aims)
            kept = keep_back(graphs.copy(portable=False), rounded, inputs, kept, excess, most, progress)
        graph = quantize(graphs.copy(portable=False), rounded, kept)


def _weight_names(model: Family, graphs: _Graphs, rounded: Rounded, kept: Sequence[int]) -> list[str]:
    """Names of the weights in the groups `kept`; tracing transposes most, and calls them val_27."""
    weights = {name: graphs.weight(name) for index in kept for name in rounded.groups[index]}
    names: dict[str, str] = {}
    for parameter, values in model.reference.named_parameters() if kept else ():
        for name, weight in weights.items():
            if values.shape == weight.T.shape and np.array_equal(values.detach().numpy(), weight.T):
                names.setdefault(name, parameter)
    return [names.get(name, name) for name in weights]


def _refusal(error: ParityError, kept: int, groups: int) -> ParityError:
    """The `error` of an 8-bit graph, and what else to try."""
    tried = f", even with {kept} of {groups} groups of products in FP32" if kept else ""
    advice = "take --bf16 or FP32, or accept less with --min-cosine"
    return ParityError(f"8 bits are too few for this model{tried}: {advice}. In 8 bits, {error}")


def _write(
    model: Family,
    draft: Manifest,
    options: ExportOptions,
    target: Path,
    step: Step,
    graph: ir.Model,
    bounds: Bounds,
    kept: Sequence[str] = (),
) -> Manifest:
    """Compare `graph` with the reference, and put it in place. `kept` are weights left in FP32."""
    with stage(graph, draft, model.tokenizer_json, target) as artifact:
        what = f"{len(model.probes)} {model.unit} against eager PyTorch"
        with step("verify", what, 2 * model.work) as progress, warnings.catch_warnings(record=options.bf16) as caught:
            if options.bf16:  # that it runs in FP32, which the report says
                warnings.simplefilter("always", SbertInferWarning)
            certificate = model.certify(artifact.path, options.precision, bounds, progress)
        if options.bf16 and not any(issubclass(one.category, SbertInferWarning) for one in caught or ()):
            draft = replace(draft, versions={**draft.versions, "openvino": str(openvino_version())})
        with step("save", str(target), 0):
            check_free(target, options.force)  # again: this took a while
            parity = {**asdict(certificate), **({"kept_fp32": list(kept)} if kept else {})}
            return artifact.commit(replace(draft, parity=parity, canaries=model.canaries()))
