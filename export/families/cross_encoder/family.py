"""Cross-encoders: a score for each pair of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sbert_infer.artifact.manifest import RERANKER, SCORES, Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.transformer import TokenCounter
from sbert_infer.export.families.cross_encoder.checkpoint import (
    CrossEncoderCheckpoint,
    is_cross_encoder,
    read_cross_encoder,
)
from sbert_infer.export.families.cross_encoder.parity import (
    ExpectedScores,
    ScoreCertificate,
    certify_scores,
    expect_scores,
    probe_pairs,
)
from sbert_infer.export.families.cross_encoder.reference import PairReference, load_pair_reference
from sbert_infer.export.families.family import Family
from sbert_infer.export.graph.trace import build_graph
from sbert_infer.export.options import ExportOptions, Progress
from sbert_infer.export.precision.int8 import Batch, calibration_samples
from sbert_infer.export.verify.canaries import choose_canaries
from sbert_infer.export.verify.parity import Bounds
from sbert_infer.types import Pair

_EVERY = 2  # one of so many probes is used for calibration


class CrossEncoder(Family):
    """A cross-encoder."""

    kind = "cross-encoder"
    unit = "pairs"
    checkpoint: CrossEncoderCheckpoint
    reference: PairReference
    probes: list[Pair]
    expected: ExpectedScores

    @classmethod
    def recognises(cls, path: Path, route: str | None) -> bool:
        """By its settings, or by an architecture for sequence classification."""
        return is_cross_encoder(path)

    @classmethod
    def read(cls, source: str | Path, options: ExportOptions) -> CrossEncoder:
        """Read one of sentence-transformers' three layouts, or a plain model of transformers."""
        return cls(
            read_cross_encoder(source, max_length=options.max_length, trust_remote_code=options.trust_remote_code),
            options,
        )

    def load(self) -> None:
        """Load the model for sequence classification."""
        self.reference = load_pair_reference(self.checkpoint)

    @property
    def description(self) -> str:
        """Architecture, labels, activation and length limit."""
        checkpoint, labels = self.checkpoint, f"{self.checkpoint.dim} label{'s' * (self.checkpoint.dim > 1)}"
        what = f"{checkpoint.model_type} cross-encoder, {labels}, {checkpoint.activation}"
        return f"{what}, {checkpoint.max_length} tokens"

    def trace(self, *, portable: bool = False) -> ir.Model:
        """Convert: input_ids, attention_mask, and token_type_ids if it has them -> scores."""
        return build_graph(self.reference, (SCORES,), portable=portable, token_types=self.reference.token_types)

    def calibration(self, texts: Sequence[str]) -> list[Batch]:
        """Batches of the user's tab-separated pairs, or of some of the probes."""
        samples = calibration_samples(_split(texts) or self.probes[::_EVERY], size=lambda pair: sum(map(len, pair)))
        return [batch for some in samples for batch in self.inputs(some)]

    def inputs(self, probes: Sequence[Pair]) -> Iterator[Batch]:
        """One batch."""
        yield {name: values.numpy() for name, values in self.reference.tokenize(probes).items()}

    def expect(self, progress: Progress) -> None:
        """Score the probes."""
        self.expected = expect_scores(self.reference, self.probes, progress)

    def certify(self, path: Path, precision: str, bounds: Bounds, progress: Progress) -> ScoreCertificate:
        """Compare the scores before the activation."""
        return certify_scores(path, self.expected, bounds.natural, progress, exact=precision == "fp32")

    def canaries(self) -> Mapping[str, Any] | None:
        """Some of the pairs with their scores."""
        expected = self.expected
        return choose_canaries(expected.pairs, expected.lengths, expected.scores[:, None])

    def _make_probes(self, count_tokens: TokenCounter) -> list[Pair]:
        return probe_pairs(count_tokens, self.checkpoint.max_length)

    def _draft_manifest(self) -> Manifest:
        return self.common_manifest(
            outputs=(SCORES,),
            kind=RERANKER,
            activation=self.checkpoint.activation,
            labels=self.checkpoint.labels,
            token_types=self.reference.token_types,
        )


def _split(lines: Sequence[str]) -> list[Pair]:
    """Pairs from lines with a tab between the two texts of each."""
    pairs = [tuple(line.split("\t")) for line in lines]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise ExportError(f"--calibration, text {number}: a cross-encoder needs two texts with a tab between them")
    return [(first, second) for first, second in pairs]
