"""An export: read a checkpoint, load its reference, convert it, certify the result, write it."""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.backends.openvino_install import openvino_version, why_no_bf16
from sbert_infer.errors import SbertInferWarning
from sbert_infer.export.checkpoint.hub import locate
from sbert_infer.export.families.cross_encoder.family import CrossEncoder
from sbert_infer.export.families.family import Family
from sbert_infer.export.families.multi_vector.family import MultiVectorEncoder
from sbert_infer.export.families.sentence import SentenceEncoder
from sbert_infer.export.families.sparse import SparseEncoder
from sbert_infer.export.graph.cpu_rewrites import tune
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.options import ExportOptions, Step, default_output, silent
from sbert_infer.export.plan_exporter import PlanWriter
from sbert_infer.export.precision.bf16 import MIN_COSINE as BF16_MIN_COSINE
from sbert_infer.export.precision.bf16 import to_bf16
from sbert_infer.export.precision.int8 import quantize
from sbert_infer.export.verify.parity import MIN_COSINE
from sbert_infer.export.write import check_free, check_target, stage

__all__ = ["ExportOptions", "default_output", "export"]

FAMILIES: tuple[type[Family], ...] = (CrossEncoder, MultiVectorEncoder, SparseEncoder, SentenceEncoder)


def export(
    source: str | Path, target: str | Path, options: ExportOptions | None = None, *, step: Step = silent
) -> Manifest:
    """Export the checkpoint `source` to the artifact `target` and return its manifest.

    `options` with FP16 give a plan, otherwise an ONNX model. Nothing is written unless the
    artifact's vectors are those of the eager model; see `Manifest.parity`.
    """
    options, target = options or ExportOptions(), Path(target)
    check_target(target, options.force)
    plan_writer = PlanWriter(options, step) if options.fp16 else None
    with step("load", str(source), 0):
        model = _read(source, options)
        model.check_options()
        model.load()
    with step("validate", model.description, 0):
        model.prepare()
    if plan_writer is None:
        return _write_onnx(model, target, step)
    return plan_writer.write(cast(SentenceEncoder, model), target)  # other kinds refuse FP16


def _read(source: str | Path, options: ExportOptions) -> Family:
    """Read the checkpoint as the first family that recognises it."""
    path = locate(str(source), options.trust_remote_code)
    family = next(family for family in FAMILIES if family.recognises(path, options.route))
    return family.read(source, options)


def _write_onnx(model: Family, target: Path, step: Step) -> Manifest:
    """Convert `model`, compare it with the reference, and put it in place."""
    options, probes = model.options, len(model.probes)
    how = {"fp32": "portable" if options.portable else "fused", "bf16": "bf16, portable", "int8": "int8, fused"}
    with step("convert", how[options.precision], 0):
        graph = model.trace(portable=options.standard)
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
    threshold = options.min_cosine or (BF16_MIN_COSINE if options.bf16 else MIN_COSINE[options.precision])
    with stage(graph, draft, model.tokenizer_json, target) as artifact:
        verifying = step("verify", f"{probes} {model.unit} against eager PyTorch", 2 * probes)
        with verifying as progress, warnings.catch_warnings():
            if options.bf16:  # that it does not run here, which the report says
                warnings.simplefilter("ignore", SbertInferWarning)
            certificate = model.certify(artifact.path, options.precision, threshold, progress)
        with step("save", str(target), 0):
            check_free(target, options.force)  # again: this took a while
            return artifact.commit(replace(draft, parity=asdict(certificate)))
