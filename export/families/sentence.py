"""Sentence encoders: one dense vector for each text, from a transformer or a static table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sbert_infer.artifact.manifest import ENCODER, SENTENCE, TOKENS, Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.modules import NormalizeSpec, PoolingSpec
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.checkpoint.static import SPARSE_STATIC, STATIC
from sbert_infer.export.families.family import Family
from sbert_infer.export.graph.trace import convert
from sbert_infer.export.options import ExportOptions, Progress
from sbert_infer.export.precision.int8 import Batch, calibration_samples
from sbert_infer.export.reference.bge_m3 import TokenHeads, load_heads, unweighted_ids
from sbert_infer.export.reference.encoder import Reference, load_reference
from sbert_infer.export.verify.canaries import choose_canaries
from sbert_infer.export.verify.parity import Bounds, Certificate, Expected, certify, expect
from sbert_infer.export.verify.probe_texts import SENTENCES
from sbert_infer.export.verify.token_parity import check_heads, check_tokens

_EVERY = 2  # one of so many probes is used for calibration, and to compare the outputs for tokens


class SentenceEncoder(Family):
    """A sentence encoder; with `--outputs` its graph also gives what the tokens have."""

    kind = "sentence encoder"
    reference: Reference
    probes: list[str]
    expected: Expected

    @classmethod
    def recognises(cls, path: Path, route: str | None) -> bool:
        """Any checkpoint that is of no other kind."""
        return True

    @classmethod
    def read(cls, source: str | Path, options: ExportOptions) -> SentenceEncoder:
        """Read the layouts of all versions of sentence-transformers."""
        checkpoint = read_checkpoint(
            source,
            max_length=options.max_length,
            route=options.route,
            trust_remote_code=options.trust_remote_code,
        )
        return cls(checkpoint, options)

    def check_options(self, options: ExportOptions) -> None:
        """Refuse a precision for a table, and pooling that the kernel does not have."""
        checkpoint = self.checkpoint
        if checkpoint.model_type in (STATIC, SPARSE_STATIC) and options.precision != "fp32":
            what = f"{checkpoint.name} is a table of static embeddings, with no layers to compute: export it without"
            raise ExportError(f"{what} --{'fp16' if options.fp16 else options.precision}")
        odd = [type(spec).__name__ for spec in checkpoint.modules if not isinstance(spec, PoolingSpec | NormalizeSpec)]
        if options.pooling == "kernel" and (checkpoint.pooling.modes != ("mean",) or odd):
            has = ", ".join(["+".join(checkpoint.pooling.modes) + " pooling", *odd])
            raise ExportError(f"--pooling kernel takes the mean and normalises, but {checkpoint.name} has {has}")

    def load(self) -> None:
        """Load the transformer and the modules after it."""
        self.reference = load_reference(self.checkpoint)

    @property
    def description(self) -> str:
        """Architecture, pooling and sizes."""
        checkpoint = self.checkpoint
        sizes = f"{checkpoint.dim} dimensions, {checkpoint.max_length} tokens"
        return f"{checkpoint.model_type}, {'+'.join(checkpoint.pooling.modes)} pooling, {sizes}"

    def trace(self, *, portable: bool = False) -> ir.Model:
        """Convert the reference with pooling and what follows inside the graph."""
        more = {"token_output": self.options.token_output} if self.heads is None else {"heads": self.heads}
        return convert(self.reference, portable=portable, **more)

    def calibration(self, texts: Sequence[str]) -> list[Batch]:
        """Batches of the user's `texts`, or of sentences and some of the probes."""
        samples = calibration_samples(texts or [*SENTENCES, *self.probes[::_EVERY]])
        return [batch for some in samples for batch in self.inputs(some)]

    def inputs(self, probes: Sequence[str]) -> Iterator[Batch]:
        """One batch."""
        ids, mask = self.reference.tokenize(probes)
        yield {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}

    def expect(self, progress: Progress) -> None:
        """Encode the probes."""
        self.expected = expect(self.reference, self.probes, progress)

    def certify(self, path: Path, precision: str, bounds: Bounds, progress: Progress) -> Certificate:
        """Compare the vectors, and the outputs for tokens if there are any."""
        certificate = certify(path, self.expected, bounds, progress)
        some = self.probes[::_EVERY]
        if self.options.token_output:
            check_tokens(path, self.reference, some, bounds)
        if self.heads is not None:
            check_heads(path, self.reference, self.heads, some, bounds, precision)
        return certificate

    def canaries(self) -> Mapping[str, Any] | None:
        """Some of the texts with their vectors."""
        expected = self.expected
        return choose_canaries(expected.texts, expected.lengths, expected.vectors[:, None])

    @cached_property
    def heads(self) -> TokenHeads | None:
        """bge-m3's additional layers, if they are to be exported."""
        return load_heads(self.reference) if self.options.all_outputs else None

    def _draft_manifest(self) -> Manifest:
        checkpoint, options = self.checkpoint, self.options
        return self.common_manifest(
            kind=ENCODER,
            pooling=checkpoint.pooling.modes,
            include_prompt=checkpoint.pooling.include_prompt,
            outputs=self._outputs(),
            unweighted_ids=unweighted_ids(self.reference.tokenizer) if options.all_outputs else (),
            head=self._head() if options.token_output else (),
        )

    def _outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs."""
        if self.options.all_outputs:
            return SENTENCE, *TokenHeads.outputs
        return (SENTENCE, TOKENS) if self.options.token_output else (SENTENCE,)

    def _head(self) -> tuple[str, ...]:
        """The modules after pooling that token vectors skip; a final Normalize is not one."""
        modules = self.checkpoint.modules
        after = modules[modules.index(self.checkpoint.pooling) + 1 :]
        after = after[:-1] if after and isinstance(after[-1], NormalizeSpec) else after
        return tuple(type(spec).__name__.removesuffix("Spec") for spec in after)
