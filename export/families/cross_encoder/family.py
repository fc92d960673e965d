"""`export` of a cross-encoder: the same five steps, for pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import onnx_ir as ir

from sbert_infer.artifact.manifest import RERANKER, SCORES, Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.reader import draft_manifest, plain_tokenizer_json, token_counter
from sbert_infer.export.families.cross_encoder.checkpoint import read_cross_encoder
from sbert_infer.export.families.cross_encoder.parity import certify_scores, probe_pairs
from sbert_infer.export.families.cross_encoder.reference import PairReference, load_pair_reference
from sbert_infer.export.graph.cpu_rewrites import tune
from sbert_infer.export.graph.fuse import count_fused, fuse
from sbert_infer.export.graph.operators import fused_operators, plain_operators
from sbert_infer.export.graph.trace import quiet_tracer, tidy, trace
from sbert_infer.export.options import ExportOptions, Step, refuse_sentence_options
from sbert_infer.export.precision.int8 import Batch, calibration_samples, quantize
from sbert_infer.export.verify.parity import MIN_COSINE
from sbert_infer.export.write import check_free, stage
from sbert_infer.types import Pair

__all__ = ["convert_pairs", "export_cross_encoder"]

_EVERY = 2  # probe pairs to calibrate with, where the user gives none


def export_cross_encoder(source: str | Path, target: Path, options: ExportOptions, step: Step) -> Manifest:
    """Export the cross-encoder `source` to the ONNX model `target`, and return its manifest."""
    refuse_sentence_options(options, "cross-encoder")
    reference, tokenizer_json, pairs = _load(source, options, step)
    with step("convert", "int8, fused" if options.int8 else "portable" if options.portable else "fused", 0):
        model = convert_pairs(reference, portable=options.portable)
        fused = count_fused(model, reference.layers, reference.gelu_layers)
        draft = replace(_draft_manifest(reference, options), fusion=asdict(fused))
        if options.int8:
            quantize(model, _calibration_batches(reference, _split(options.calibration) or pairs[::_EVERY]))
        elif not options.portable:
            tune(model)
    threshold = options.min_cosine or MIN_COSINE[options.precision]
    with stage(model, draft, tokenizer_json, target) as artifact:
        with step("verify", f"{len(pairs)} pairs against eager PyTorch", 2 * len(pairs)) as progress:
            exact = not options.int8
            certificate = certify_scores(artifact.path, reference, pairs, threshold, exact=exact, progress=progress)
        with step("save", str(target), 0):
            check_free(target, options.force)  # again: this took a while
            return artifact.commit(replace(draft, parity=certificate.to_dict()))


def convert_pairs(reference: PairReference, *, portable: bool = False) -> ir.Model:
    """Convert `reference`: input_ids, attention_mask, and token_type_ids where it has them -> scores."""
    with quiet_tracer():
        with plain_operators(reference.encoder) if portable else fused_operators(reference.encoder):
            model = trace(
                reference,
                reference.checkpoint,
                prompt=False,
                outputs=(SCORES,),
                token_types=reference.token_types,
            )
        if not portable:
            model = fuse(model)
        model.graph.outputs[0].name = SCORES  # a fusion may have put another value in its place
        return tidy(model)


def _load(source: str | Path, options: ExportOptions, step: Step) -> tuple[PairReference, str, list[Pair]]:
    """The reference, its tokenizer, and pairs to verify with."""
    with step("load", str(source), 0):
        cross_encoder = read_cross_encoder(
            source, max_length=options.max_length, trust_remote_code=options.trust_remote_code
        )
        reference = load_pair_reference(cross_encoder)
    checkpoint, labels = cross_encoder.checkpoint, len(cross_encoder.labels)
    what = f"{checkpoint.model_type} cross-encoder, {labels} label{'s' * (labels > 1)}, {cross_encoder.activation}"
    with step("validate", f"{what}, {checkpoint.max_length} tokens", 0):
        tokenizer_json = plain_tokenizer_json(reference.tokenizer)
        return reference, tokenizer_json, probe_pairs(token_counter(tokenizer_json), checkpoint.max_length)


def _draft_manifest(reference: PairReference, options: ExportOptions) -> Manifest:
    """All of the manifest but the parity certificate and the count of fused nodes."""
    cross_encoder = reference.cross_encoder
    return draft_manifest(
        reference.checkpoint,
        reference.tokenizer,
        options,
        dim=len(cross_encoder.labels),
        pooling=(),
        include_prompt=True,
        normalized=False,
        truncate_dim=None,
        outputs=(SCORES,),
        kind=RERANKER,
        activation=cross_encoder.activation,
        labels=cross_encoder.labels,
        token_types=reference.token_types,
    )


def _split(lines: Sequence[str]) -> list[Pair]:
    """Pairs of a file with a tab between the two texts of each line."""
    pairs = [tuple(line.split("\t")) for line in lines]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise ExportError(f"--calibration, text {number}: a cross-encoder needs two texts with a tab between them")
    return [(first, second) for first, second in pairs]


def _calibration_batches(reference: PairReference, pairs: Sequence[Pair]) -> Iterator[Batch]:
    for some in calibration_samples(pairs, size=lambda pair: sum(map(len, pair))):
        batch = reference.tokenize(some)
        yield {name: values.numpy() for name, values in batch.items()}
