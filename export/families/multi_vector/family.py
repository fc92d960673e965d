"""Multi-vector encoders (ColBERT and similar): a vector for each token, by role of the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sbert_infer.artifact.manifest import MULTI_VECTOR, TOKENS, Manifest
from sbert_infer.export.checkpoint.transformer import TokenCounter
from sbert_infer.export.families.family import Family
from sbert_infer.export.families.multi_vector.checkpoint import (
    MultiVectorCheckpoint,
    is_multi_vector,
    read_multi_vector,
)
from sbert_infer.export.families.multi_vector.parity import (
    ExpectedVectors,
    MultiVectorCertificate,
    certify_multi_vector,
    expect_vectors,
)
from sbert_infer.export.families.multi_vector.reference import MultiVectorReference, load_multi_vector_reference
from sbert_infer.export.graph.trace import build_graph
from sbert_infer.export.options import ExportOptions, Progress
from sbert_infer.export.precision.int8 import Batch, calibration_samples
from sbert_infer.export.verify.canaries import choose_canaries
from sbert_infer.export.verify.parity import Bounds
from sbert_infer.export.verify.probe_texts import SENTENCES

_EVERY = 8  # one of so many probes is used for calibration


class MultiVectorEncoder(Family):
    """A multi-vector encoder."""

    kind = "multi-vector encoder"
    unit = "texts in each role"
    checkpoint: MultiVectorCheckpoint
    reference: MultiVectorReference
    probes: list[str]
    expected: ExpectedVectors

    @classmethod
    def recognises(cls, path: Path, route: str | None) -> bool:
        """By its settings, or by Stanford's architecture."""
        return is_multi_vector(path)

    @classmethod
    def read(cls, source: str | Path, options: ExportOptions) -> MultiVectorEncoder:
        """Read the layout of sentence-transformers, PyLate or Stanford's code."""
        return cls(
            read_multi_vector(source, max_length=options.max_length, trust_remote_code=options.trust_remote_code),
            options,
        )

    def load(self) -> None:
        """Load the transformer and the modules on its token vectors."""
        self.reference = load_multi_vector_reference(self.checkpoint)

    @property
    def description(self) -> str:
        """Architecture and sizes."""
        checkpoint, roles = self.checkpoint, self.checkpoint.roles
        limits = f"{roles['query'].max_length} and {roles['document'].max_length} tokens"
        return f"{checkpoint.model_type} multi-vector encoder, {checkpoint.dim} dimensions, {limits}"

    def trace(self, *, portable: bool = False) -> ir.Model:
        """Convert the reference: input_ids, attention_mask -> token_embeddings.

        Causality hides padding on the right from the tokens before it, but not from an expansion,
        whose tokens get vectors without being attended to: then the mask must stay.
        """
        masked = any(role.expand_to and not role.attend_to_expansion for role in self.checkpoint.roles.values())
        side = "left" if masked else self.reference.tokenizer.padding_side
        return build_graph(self.reference, (TOKENS,), portable=portable, padding_side=side)

    def calibration(self, texts: Sequence[str]) -> list[Batch]:
        """Batches of the user's `texts`, or of sentences and some of the probes."""
        samples = calibration_samples(texts or [*SENTENCES, *self.probes[::_EVERY]])
        return [batch for some in samples for batch in self.inputs(some)]

    def inputs(self, probes: Sequence[str]) -> Iterator[Batch]:
        """All of them as documents, and a quarter as queries."""
        for task, rows in (("document", slice(None)), ("query", slice(None, None, 4))):
            prompt = self.checkpoint.prompts[task]
            tokens = self.reference.tokenize([prompt + text for text in probes[rows]], task)
            yield {"input_ids": tokens.input_ids.numpy(), "attention_mask": tokens.attention_mask.numpy()}

    def expect(self, progress: Progress) -> None:
        """Encode the probes in each role."""
        self.expected = expect_vectors(self.reference, self.probes, progress)

    def certify(self, path: Path, precision: str, bounds: Bounds, progress: Progress) -> MultiVectorCertificate:
        """Compare the vectors of all tokens in each role."""
        return certify_multi_vector(path, self.expected, bounds, progress)

    def canaries(self) -> Mapping[str, Any] | None:
        """Some of the texts as queries and as documents, with their vectors."""
        return choose_canaries(*self.expected.by_text())

    def _work(self, count_tokens: TokenCounter) -> int:
        return 2 * len(self.probes)  # as queries and as documents

    def _draft_manifest(self) -> Manifest:
        return self.common_manifest(
            outputs=(TOKENS,),
            kind=MULTI_VECTOR,
            roles={task: asdict(role) for task, role in self.checkpoint.roles.items()},
        )
