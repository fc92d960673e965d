"""Sparse encoders: a number for each word of a vocabulary, most of them zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sbert_infer.artifact.manifest import SPARSE, SPARSE_ENCODER, Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.modules_json import has_sparse_module, read_entries
from sbert_infer.export.checkpoint.transformer import TokenCounter
from sbert_infer.export.families.sentence import SentenceEncoder
from sbert_infer.export.options import ExportOptions, Progress
from sbert_infer.export.verify.parity import Bounds
from sbert_infer.export.verify.sparse_parity import SparseCertificate, certify_sparse, some_texts


class SparseEncoder(SentenceEncoder):
    """A sentence encoder whose last module gives sparse vectors."""

    kind = "sparse encoder"

    @classmethod
    def recognises(cls, path: Path, route: str | None) -> bool:
        """By the modules that modules.json lists."""
        return has_sparse_module(read_entries(path, route, []))

    def check_options(self, options: ExportOptions) -> None:
        """Refuse plans, and further outputs."""
        super().check_options(options)
        if options.fp16 or len(options.outputs) > 1:
            what = "--fp16" if options.fp16 else f"--outputs {options.outputs[-1]}"
            raise ExportError(f"{self.checkpoint.name} is a sparse encoder, for which there is no {what}: leave it out")

    def certify(self, path: Path, precision: str, bounds: Bounds, progress: Progress) -> SparseCertificate:
        """Compare the vectors, and which of their dimensions are active."""
        return certify_sparse(path, self.expected, bounds, progress)

    def _make_probes(self, count_tokens: TokenCounter) -> list[str]:
        return some_texts(super()._make_probes(count_tokens), self.checkpoint.dim)

    def _draft_manifest(self) -> Manifest:
        draft = super()._draft_manifest()
        return replace(draft, kind=SPARSE_ENCODER, max_active_dims=self.checkpoint.max_active_dims)

    def _outputs(self) -> tuple[str, ...]:
        return (SPARSE,)
