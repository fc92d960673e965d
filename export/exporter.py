"""The five steps of an export: load, validate, convert, verify, save."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime
import tokenizers
import torch
import transformers

import sbert_infer
from sbert_infer.artifact import Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint import Checkpoint, read_checkpoint, weights_sha256
from sbert_infer.export.convert import convert
from sbert_infer.export.fuse import count_fused
from sbert_infer.export.int8 import Batch, quantize
from sbert_infer.export.modules import NormalizeSpec
from sbert_infer.export.parity import MIN_COSINE, certify
from sbert_infer.export.probe import SENTENCES, probe_texts
from sbert_infer.export.reference import Reference, load_reference
from sbert_infer.export.save import check_writable, stage

__all__ = ["ExportOptions", "Step", "default_output", "export_onnx"]

_CALIBRATION_TEXTS = 512  # more change the largest activations little
_EVERY = 8  # probe texts that join the sentences where the user gives no calibration texts
_CALIBRATION_BATCH = 16

# Announces a step; the context it gives takes the number of texts done.
Step = Callable[[str, str, int], AbstractContextManager[Callable[[int], object]]]


@dataclass(frozen=True)
class ExportOptions:
    """How to export. The defaults give an FP32 graph fused for onnxruntime."""

    int8: bool = False
    portable: bool = False  # standard operators only
    max_length: int | None = None  # tokens; the checkpoint's own limit by default
    calibration: Sequence[str] = ()  # texts like those to be encoded, for int8
    min_cosine: float | None = None  # the parity threshold; by precision if not given
    force: bool = False  # replace an existing file
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.int8 and self.portable:
            raise ExportError("--int8 needs operators of onnxruntime: it can't be --portable")
        if self.min_cosine is not None and not 0 < self.min_cosine <= 1:
            raise ExportError(f"the lowest cosine accepted must be above 0 and at most 1, got {self.min_cosine}")

    @property
    def precision(self) -> str:
        """The precision's name in the manifest."""
        return "int8" if self.int8 else "fp32"


def default_output(source: str, options: ExportOptions) -> Path:
    """`some/model/` -> `model.onnx`, in the current folder."""
    name = Path(source).resolve().name if Path(source).is_dir() else source.rstrip("/").rpartition("/")[2]
    return Path(f"{name}.int8.onnx" if options.int8 else f"{name}.onnx")


def _silent(name: str, detail: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda count: None)


def export_onnx(
    source: str | Path, target: str | Path, options: ExportOptions | None = None, *, step: Step = _silent
) -> Manifest:
    """Export the checkpoint `source` to the ONNX artifact `target` and return its manifest.

    Nothing is written unless the artifact's vectors are those of the eager model; see `Manifest.parity`.
    """
    options = options or ExportOptions()
    target = Path(target)
    check_target(target, options.force)
    with step("load", str(source), 0):
        checkpoint = read_checkpoint(source, max_length=options.max_length, trust_remote_code=options.trust_remote_code)
        reference = load_reference(checkpoint)
    with step("validate", describe(checkpoint), 0):
        tokenizer_json = _tokenizer_json(reference)
        texts = probe_texts(_token_counter(tokenizer_json), checkpoint.max_length)
        draft = _draft_manifest(reference, options)
    with step("convert", "int8, fused" if options.int8 else "portable" if options.portable else "fused", 0):
        model = convert(reference, portable=options.portable)
        fused = count_fused(model, reference.layers, reference.gelu_layers)
        draft = replace(draft, fusion=asdict(fused))
        if options.int8:
            quantize(model, _calibration_batches(reference, options.calibration or [*SENTENCES, *texts[::_EVERY]]))
    threshold = options.min_cosine or MIN_COSINE[options.precision]
    with stage(model, draft, tokenizer_json, target) as artifact:
        with step("verify", f"{len(texts)} texts against eager PyTorch", 2 * len(texts)) as progress:
            certificate = certify(artifact.path, reference, texts, threshold, progress)
        with step("save", str(target), 0):
            _check_free(target, options.force)  # again: this took a while
            return artifact.commit(replace(draft, parity=certificate.to_dict()))


def check_target(target: Path, force: bool) -> None:
    """Refuse an output that can't or must not be written, before the work starts."""
    if target.is_dir():
        raise ExportError(f"{target} is a folder: name a file")
    if not target.parent.is_dir():
        raise ExportError(f"the folder {target.parent} does not exist")
    _check_free(target, force)
    check_writable(target)


def _check_free(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise ExportError(f"{target} exists: give --force to replace it, or another name with -o")


def describe(checkpoint: Checkpoint) -> str:
    """One line for people."""
    pooling = "+".join(checkpoint.pooling.modes)
    return f"{checkpoint.model_type}, {pooling} pooling, {checkpoint.dim} dimensions, {checkpoint.max_length} tokens"


def _draft_manifest(reference: Reference, options: ExportOptions) -> Manifest:
    """All of the manifest but the parity certificate and the count of fused nodes."""
    checkpoint, tokenizer = reference.checkpoint, reference.tokenizer
    return Manifest(
        name=checkpoint.name,
        architecture=checkpoint.model_type,
        precision=options.precision,
        dim=checkpoint.dim,
        max_length=checkpoint.max_length,
        pooling=checkpoint.pooling.modes,
        include_prompt=checkpoint.pooling.include_prompt,
        normalized=isinstance(checkpoint.modules[-1], NormalizeSpec),
        prompts=checkpoint.prompts,
        default_prompt_name=checkpoint.default_prompt_name,
        similarity=checkpoint.similarity,
        truncate_dim=checkpoint.truncate_dim,
        pad_id=tokenizer.pad_token_id,
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        weights_sha256=weights_sha256(checkpoint),
        parity={},
        fusion={},
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    modules: list[Any] = [sbert_infer, torch, transformers, tokenizers, onnxruntime]
    return {module.__name__: module.__version__ for module in modules}


def _tokenizer_json(reference: Reference) -> str:
    """The tokenizer without the truncation and padding that a file may bake in: the manifest has the true ones."""
    content = json.loads(reference.tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None
    return json.dumps(content, ensure_ascii=False)


def _token_counter(tokenizer_json: str) -> Callable[[Sequence[str]], list[int]]:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    return lambda texts: [len(encoding) for encoding in tokenizer.encode_batch_fast(texts)]


def _calibration_batches(reference: Reference, texts: Sequence[str]) -> Iterator[Batch]:
    some = sorted(texts[:: max(1, len(texts) // _CALIBRATION_TEXTS)], key=len)
    for start in range(0, len(some), _CALIBRATION_BATCH):
        ids, mask = reference.tokenize(some[start : start + _CALIBRATION_BATCH])
        yield {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
