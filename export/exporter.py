"""The five steps of an export: load, validate, convert, verify, save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from sbert_infer.artifact.manifest import Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.reader import load
from sbert_infer.export.families.cross_encoder.checkpoint import is_cross_encoder
from sbert_infer.export.families.cross_encoder.family import export_cross_encoder
from sbert_infer.export.families.multi_vector.checkpoint import is_multi_vector
from sbert_infer.export.families.multi_vector.family import export_multi_vector
from sbert_infer.export.graph.cpu_rewrites import tune
from sbert_infer.export.graph.fuse import count_fused
from sbert_infer.export.graph.trace import convert
from sbert_infer.export.options import ExportOptions, Step, default_output, silent
from sbert_infer.export.plan_exporter import export_plan
from sbert_infer.export.precision.int8 import Batch, calibration_samples, quantize
from sbert_infer.export.reference.bge_m3 import check_heads, load_heads
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.parity import MIN_COSINE, certify
from sbert_infer.export.verify.probe_texts import SENTENCES
from sbert_infer.export.verify.sparse_parity import certify_sparse, some_texts
from sbert_infer.export.verify.token_parity import check_tokens
from sbert_infer.export.write import check_free, check_writable, stage

__all__ = ["ExportOptions", "default_output", "export", "export_onnx"]

_EVERY = 8  # probe texts that join the sentences where the user gives no calibration texts


def export(
    source: str | Path, target: str | Path, options: ExportOptions | None = None, *, step: Step = silent
) -> Manifest:
    """Export the checkpoint `source` to the artifact `target`, a plan if `options` say FP16; returns its manifest.

    Nothing is written unless the artifact's vectors are those of the eager model; see
    `Manifest.parity`.
    """
    options, target = options or ExportOptions(), Path(target)
    check_target(target, options.force)
    write = export_plan if options.fp16 else export_onnx
    if is_cross_encoder(source, trust_remote_code=options.trust_remote_code):
        write = export_cross_encoder
    elif is_multi_vector(source, trust_remote_code=options.trust_remote_code):
        write = export_multi_vector
    if options.all_outputs and write is not export_onnx:
        raise ExportError("--outputs sparse,multi is for sentence encoders that have such layers: leave it out")
    return write(source, target, options, step)


def export_onnx(source: str | Path, target: Path, options: ExportOptions, step: Step) -> Manifest:
    """`export` to an ONNX model."""
    loaded = load(source, options, step)
    reference, texts = loaded.reference, loaded.texts
    check = certify
    if reference.checkpoint.is_sparse:
        check, texts = certify_sparse, some_texts(texts, reference.checkpoint.dim)
    with step("convert", "int8, fused" if options.int8 else "portable" if options.portable else "fused", 0):
        heads = load_heads(reference) if options.all_outputs else None
        more = {"token_output": options.token_output} if heads is None else {"heads": heads}
        model = convert(reference, portable=options.portable, **more)
        fused = count_fused(model, reference.layers, reference.gelu_layers)
        draft = replace(loaded.draft, fusion=asdict(fused))
        if options.int8:
            quantize(model, _calibration_batches(reference, options.calibration or [*SENTENCES, *texts[::_EVERY]]))
        elif not options.portable:
            tune(model)
    threshold = options.min_cosine or MIN_COSINE[options.precision]
    with stage(model, draft, loaded.tokenizer_json, target) as artifact:
        with step("verify", f"{len(texts)} texts against eager PyTorch", 2 * len(texts)) as progress:
            certificate = check(artifact.path, reference, texts, threshold, progress)
            if options.token_output:
                check_tokens(artifact.path, reference, texts[::_EVERY], threshold)
            if heads is not None:
                check_heads(artifact.path, reference, heads, texts[::_EVERY], threshold, options.precision)
        with step("save", str(target), 0):
            check_free(target, options.force)  # again: this took a while
            return artifact.commit(replace(draft, parity=certificate.to_dict()))


def check_target(target: Path, force: bool) -> None:
    """Refuse an output that can't or must not be written, before the work starts."""
    if target.is_dir():
        raise ExportError(f"{target} is a folder: name a file")
    if not target.parent.is_dir():
        raise ExportError(f"the folder {target.parent} does not exist")
    check_free(target, force)
    check_writable(target)


def _calibration_batches(reference: Reference, texts: Sequence[str]) -> Iterator[Batch]:
    for some in calibration_samples(texts):
        ids, mask = reference.tokenize(some)
        yield {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
