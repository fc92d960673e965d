"""A checkpoint, loaded and validated: where every export begins."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import tokenizers
import torch
import transformers

import sbert_infer
from sbert_infer.artifact.manifest import ENCODER, SENTENCE, SPARSE, SPARSE_ENCODER, TOKENS, Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint, read_checkpoint, weights_sha256
from sbert_infer.export.checkpoint.modules import NormalizeSpec
from sbert_infer.export.checkpoint.sparse_static import SPARSE_STATIC
from sbert_infer.export.checkpoint.static import MODEL_TYPE
from sbert_infer.export.options import ExportOptions, Step
from sbert_infer.export.reference.bge_m3 import TokenHeads, unweighted_ids
from sbert_infer.export.reference.encoder import Reference, load_reference
from sbert_infer.export.verify.probe_texts import MAX_PROBE_LENGTH, probe_texts

__all__ = ["Loaded", "draft_manifest", "load", "plain_tokenizer_json", "token_counter"]


@dataclass(frozen=True)
class Loaded:
    """What there is before the conversion."""

    reference: Reference
    tokenizer_json: str
    texts: list[str]  # to verify with
    draft: Manifest  # all of it but the parity certificate and the count of fused nodes


def load(source: str | Path, options: ExportOptions, step: Step) -> Loaded:
    """Read the checkpoint `source` and make its reference."""
    with step("load", str(source), 0):
        checkpoint = read_checkpoint(
            source,
            max_length=options.max_length,
            route=options.route,
            trust_remote_code=options.trust_remote_code,
        )
        _check_options(checkpoint, options)
        reference = load_reference(checkpoint)
    with step("validate", describe(checkpoint), 0):
        tokenizer_json = plain_tokenizer_json(reference.tokenizer)
        texts = probe_texts(token_counter(tokenizer_json), min(checkpoint.max_length, MAX_PROBE_LENGTH))
        return Loaded(reference, tokenizer_json, texts, _draft_manifest(reference, options))


def _check_options(checkpoint: Checkpoint, options: ExportOptions) -> None:
    if checkpoint.model_type in (MODEL_TYPE, SPARSE_STATIC) and options.precision != "fp32":
        what = f"{checkpoint.name} is a table of static embeddings, with no layers to compute"
        raise ExportError(f"{what}: export it without --{options.precision}")
    if checkpoint.is_sparse and (options.fp16 or len(options.outputs) > 1):
        what = "--fp16" if options.fp16 else f"--outputs {options.outputs[-1]}"
        raise ExportError(f"{checkpoint.name} is a sparse encoder, for which there is no {what}: leave it out")


def describe(checkpoint: Checkpoint) -> str:
    """One line for people."""
    pooling = "+".join(checkpoint.pooling.modes)
    return f"{checkpoint.model_type}, {pooling} pooling, {checkpoint.dim} dimensions, {checkpoint.max_length} tokens"


def _draft_manifest(reference: Reference, options: ExportOptions) -> Manifest:
    """All of the manifest but the parity certificate and the count of fused nodes."""
    checkpoint = reference.checkpoint
    return draft_manifest(
        checkpoint,
        reference.tokenizer,
        options,
        kind=SPARSE_ENCODER if checkpoint.is_sparse else ENCODER,
        max_active_dims=checkpoint.max_active_dims,
        dim=checkpoint.dim,
        pooling=checkpoint.pooling.modes,
        include_prompt=checkpoint.pooling.include_prompt,
        normalized=isinstance(checkpoint.modules[-1], NormalizeSpec),
        truncate_dim=checkpoint.truncate_dim,
        outputs=_outputs(checkpoint, options),
        unweighted_ids=unweighted_ids(reference.tokenizer) if options.all_outputs else (),
        head=_head(checkpoint) if options.token_output else (),
    )


def _head(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The modules behind the pooling, which token vectors do not go through, but for a Normalize at the end."""
    behind = checkpoint.modules[checkpoint.modules.index(checkpoint.pooling) + 1 :]
    behind = behind[:-1] if behind and isinstance(behind[-1], NormalizeSpec) else behind
    return tuple(type(spec).__name__.removesuffix("Spec") for spec in behind)


def _outputs(checkpoint: Checkpoint, options: ExportOptions) -> tuple[str, ...]:
    """Of the graph."""
    if options.all_outputs:
        return SENTENCE, *TokenHeads.outputs
    if options.token_output:
        return SENTENCE, TOKENS
    return (SPARSE if checkpoint.is_sparse else SENTENCE,)


def draft_manifest(checkpoint: Checkpoint, tokenizer: Any, options: ExportOptions, **own: Any) -> Manifest:
    """What the manifests of all kinds say of a checkpoint, and what this one says of its `own`."""
    return Manifest(
        name=checkpoint.name,
        architecture=checkpoint.model_type,
        precision=options.precision,
        max_length=checkpoint.max_length,
        prompts=checkpoint.prompts,
        default_prompt_name=checkpoint.default_prompt_name,
        similarity=checkpoint.similarity,
        pad_id=tokenizer.pad_token_id,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        weights_sha256=weights_sha256(checkpoint),
        parity={},
        fusion={},
        versions=_versions(),
        **own,
    )


def _versions() -> dict[str, str]:
    """Of the packages that an artifact is made with."""
    modules: list[Any] = [sbert_infer, torch, transformers, tokenizers, onnxruntime]
    return {module.__name__: module.__version__ for module in modules}


def plain_tokenizer_json(tokenizer: Any) -> str:
    """The tokenizer without the truncation and padding that a file may bake in: the manifest has the true ones."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    return json.dumps(content, ensure_ascii=False)


def token_counter(tokenizer_json: str) -> Callable[[Sequence[Any]], list[int]]:
    """Counts the tokens of texts, or of pairs of texts."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    return lambda texts: [len(encoding) for encoding in tokenizer.encode_batch_fast(texts)]
