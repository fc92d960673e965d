"""`export` of a multi-vector encoder: the same five steps, for the vectors of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path

import onnx_ir as ir

from sbert_infer.artifact.manifest import MULTI_VECTOR, TOKENS, Manifest
from sbert_infer.export.checkpoint.modules import NormalizeSpec
from sbert_infer.export.checkpoint.reader import draft_manifest, plain_tokenizer_json, token_counter
from sbert_infer.export.families.multi_vector.checkpoint import read_multi_vector
from sbert_infer.export.families.multi_vector.parity import certify_multi_vector
from sbert_infer.export.families.multi_vector.reference import MultiVectorReference, load_multi_vector_reference
from sbert_infer.export.graph.cpu_rewrites import tune
from sbert_infer.export.graph.fuse import count_fused, fuse
from sbert_infer.export.graph.operators import fused_operators, plain_operators
from sbert_infer.export.graph.trace import quiet_tracer, tidy, trace
from sbert_infer.export.options import ExportOptions, Step, refuse_sentence_options
from sbert_infer.export.precision.int8 import Batch, calibration_samples, quantize
from sbert_infer.export.verify.parity import MIN_COSINE
from sbert_infer.export.verify.probe_texts import MAX_PROBE_LENGTH, SENTENCES, probe_texts
from sbert_infer.export.write import check_free, stage

__all__ = ["convert_multi_vector", "export_multi_vector"]

_EVERY = 8  # probe texts that join the sentences where the user gives no calibration texts


def export_multi_vector(source: str | Path, target: Path, options: ExportOptions, step: Step) -> Manifest:
    """Export the multi-vector encoder `source` to the ONNX model `target`, and return its manifest."""
    refuse_sentence_options(options, "multi-vector encoder")
    reference, tokenizer_json, texts = _load(source, options, step)
    with step("convert", "int8, fused" if options.int8 else "portable" if options.portable else "fused", 0):
        model = convert_multi_vector(reference, portable=options.portable)
        fused = count_fused(model, reference.layers, reference.gelu_layers)
        draft = replace(_draft_manifest(reference, options), fusion=asdict(fused))
        if options.int8:
            quantize(model, _calibration_batches(reference, options.calibration or [*SENTENCES, *texts[::_EVERY]]))
        elif not options.portable:
            tune(model)
    threshold = options.min_cosine or MIN_COSINE[options.precision]
    with stage(model, draft, tokenizer_json, target) as artifact:
        with step("verify", f"{len(texts)} texts in each role against eager PyTorch", 2 * len(texts)) as progress:
            certificate = certify_multi_vector(artifact.path, reference, texts, threshold, progress)
        with step("save", str(target), 0):
            check_free(target, options.force)  # again: this took a while
            return artifact.commit(replace(draft, parity=certificate.to_dict()))


def convert_multi_vector(reference: MultiVectorReference, *, portable: bool = False) -> ir.Model:
    """Convert `reference`: input_ids, attention_mask -> token_embeddings."""
    with quiet_tracer():
        with plain_operators(reference.encoder) if portable else _fused_operators(reference):
            model = trace(reference, reference.checkpoint, prompt=False, outputs=(TOKENS,))
        if not portable:
            model = fuse(model)
        model.graph.outputs[0].name = TOKENS  # a fusion may have put another value in its place
        return tidy(model)


def _fused_operators(reference: MultiVectorReference) -> AbstractContextManager[None]:
    """Causality hides padding at the right end only from tokens before it: not from an expansion that has vectors."""
    hidden = any(role.expand_to and not role.attend_to_expansion for role in reference.multi_vector.roles.values())
    side, longest = reference.tokenizer.padding_side, reference.checkpoint.max_length
    return fused_operators(reference.encoder, padding_side="left" if hidden else side, max_length=longest)


def _load(source: str | Path, options: ExportOptions, step: Step) -> tuple[MultiVectorReference, str, list[str]]:
    """The reference, its tokenizer, and texts to verify with."""
    with step("load", str(source), 0):
        multi_vector = read_multi_vector(
            source, max_length=options.max_length, trust_remote_code=options.trust_remote_code
        )
        reference = load_multi_vector_reference(multi_vector)
    checkpoint, roles = multi_vector.checkpoint, multi_vector.roles
    limits = f"{roles['query'].max_length} and {roles['document'].max_length} tokens"
    with step("validate", f"{checkpoint.model_type} multi-vector encoder, {multi_vector.dim} dimensions, {limits}", 0):
        tokenizer_json = plain_tokenizer_json(reference.tokenizer)
        texts = probe_texts(token_counter(tokenizer_json), min(checkpoint.max_length, MAX_PROBE_LENGTH))
        return reference, tokenizer_json, texts


def _draft_manifest(reference: MultiVectorReference, options: ExportOptions) -> Manifest:
    """All of the manifest but the parity certificate and the count of fused nodes."""
    checkpoint, multi_vector = reference.checkpoint, reference.multi_vector
    return draft_manifest(
        checkpoint,
        reference.tokenizer,
        options,
        dim=multi_vector.dim,
        pooling=(),
        include_prompt=True,
        normalized=bool(checkpoint.modules) and isinstance(checkpoint.modules[-1], NormalizeSpec),
        truncate_dim=None,
        outputs=(TOKENS,),
        kind=MULTI_VECTOR,
        roles={task: asdict(role) for task, role in multi_vector.roles.items()},
    )


def _calibration_batches(reference: MultiVectorReference, texts: Sequence[str]) -> Iterator[Batch]:
    """As documents and, a few of each, as queries."""
    for some in calibration_samples(texts):
        for task, rows in (("document", slice(None)), ("query", slice(None, None, 4))):
            prompt = reference.checkpoint.prompts[task]
            batch = [prompt + text for text in some[rows]]
            tokens = reference.tokenize(batch, task)
            yield {"input_ids": tokens.input_ids.numpy(), "attention_mask": tokens.attention_mask.numpy()}
