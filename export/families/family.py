"""The interface of a kind of model, which `exporter.py` calls and the other modules implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import onnxruntime
import tokenizers
import torch
import transformers

import sbert_infer
from sbert_infer.artifact.manifest import Manifest
from sbert_infer.errors import ExportError
from sbert_infer.export.checkpoint.checkpoint import Checkpoint, weights_sha256
from sbert_infer.export.checkpoint.modules import NormalizeSpec
from sbert_infer.export.checkpoint.transformer import TokenCounter, plain_tokenizer_json, token_counter
from sbert_infer.export.options import ExportOptions, Progress
from sbert_infer.export.precision.int8 import Batch
from sbert_infer.export.reference.encoder import Encoder
from sbert_infer.export.verify.parity import Bounds
from sbert_infer.export.verify.probe_texts import probe_texts


class Family(ABC):
    """A checkpoint of one kind of model, on its way to an artifact.

    The calls come in this order: `recognises`, `read`, `check_options`, `load`, `prepare`,
    `expect`, `trace`, `calibration` (for 8 bits), `certify` and `canaries`. Nothing but
    `check_options` and `certify` depends on the precision, so several artifacts can be made from
    one object.
    """

    kind: ClassVar[str]  # in messages: "cross-encoder"
    unit: ClassVar[str] = "texts"  # what `probes` are

    reference: Encoder  # from `load` on
    tokenizer_json: str  # from `prepare` on, as is what follows
    probes: Sequence[Any]  # texts, or pairs of texts, to compare the artifact with the reference on
    work: int  # of one pass over the probes, in the unit that `progress` takes
    draft: Manifest  # complete except for precision, fusion and parity

    def __init__(self, checkpoint: Checkpoint, options: ExportOptions) -> None:
        self.checkpoint, self.options = checkpoint, options

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path, route: str | None) -> bool:
        """Whether the folder `path` holds such a model. An unreadable one belongs to no kind."""

    @classmethod
    @abstractmethod
    def read(cls, source: str | Path, options: ExportOptions) -> Family:
        """Read and validate the files; raises `CheckpointError`. The weights stay on disk."""

    def check_options(self, options: ExportOptions) -> None:
        """Raise `ExportError` for options that this kind of model does not have."""
        if len(options.outputs) > 1 or options.route is not None:
            raise ExportError(
                f"--outputs and --route are for sentence encoders, and this is a {self.kind}: leave them out"
            )
        if options.fp16:
            raise ExportError(f"--fp16 is not supported for {self.kind}s yet: leave it out, or take --int8")

    @abstractmethod
    def load(self) -> None:
        """Load the weights into the eager reference; raises `CheckpointError`."""

    @property
    @abstractmethod
    def description(self) -> str:
        """One line about the checkpoint."""

    def prepare(self) -> None:
        """Prepare what every artifact needs beside the graph: tokenizer, probes and manifest."""
        self.tokenizer_json = plain_tokenizer_json(self.reference.tokenizer)
        count_tokens = token_counter(self.tokenizer_json)
        self.probes = self._make_probes(count_tokens)
        self.work = self._work(count_tokens)
        self.draft = self._draft_manifest()

    @abstractmethod
    def expect(self, progress: Progress) -> None:
        """Run the reference on the probes, once for all artifacts; raises `ParityError` for NaN."""

    @abstractmethod
    def trace(self, *, portable: bool = False) -> ir.Model:
        """Convert the reference to a graph: of standard operators, or fused for onnxruntime."""

    @abstractmethod
    def calibration(self, texts: Sequence[str]) -> list[Batch]:
        """Batches of the user's `texts`, or of some of the probes if there are none."""

    @abstractmethod
    def inputs(self, probes: Sequence[Any]) -> Iterator[Batch]:
        """What the graph takes for some of the probes, padded to the same length."""

    @abstractmethod
    def certify(self, path: Path, precision: str, bounds: Bounds, progress: Progress) -> Any:
        """Compare the artifact at `path` with the reference; return its certificate, a dataclass.

        Raises `ParityError` out of `bounds`. `progress` takes the tokens done, twice `work` in all.
        """

    @abstractmethod
    def canaries(self) -> Mapping[str, Any] | None:
        """Some of the probes with the reference's results, for the artifact to carry."""

    def _make_probes(self, count_tokens: TokenCounter) -> Sequence[Any]:
        """The probes, up to the model's limit."""
        return probe_texts(count_tokens, self.checkpoint.max_length)

    def _work(self, count_tokens: TokenCounter) -> int:
        """Tokens of the probes, as far as the model takes them."""
        return int(np.minimum(count_tokens(self.probes), self.checkpoint.max_length).sum())

    @abstractmethod
    def _draft_manifest(self) -> Manifest:
        """The manifest, without precision, fusion and parity."""

    def common_manifest(self, *, pooling: tuple[str, ...] = (), include_prompt: bool = True, **own: Any) -> Manifest:
        """A manifest with what all kinds of model have, and with the `own` values of this one."""
        checkpoint, tokenizer = self.checkpoint, self.reference.tokenizer
        return Manifest(
            name=checkpoint.name,
            architecture=checkpoint.model_type,
            precision="",
            dim=checkpoint.dim,
            max_length=checkpoint.max_length,
            normalized=bool(checkpoint.modules) and isinstance(checkpoint.modules[-1], NormalizeSpec),
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
            pooling=pooling,
            include_prompt=include_prompt,
            max_positions=checkpoint.max_positions,
            tokenizer=_tokenizer_facts(tokenizer),
            **own,
        )


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any] | None:
    """What tokenizer_config.json says beside tokenizer.json; None for one that has no such file."""
    if not hasattr(tokenizer, "special_tokens_map"):
        return None
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return {"input_names": list(tokenizer.model_input_names), "special_tokens": special}


def _versions() -> dict[str, str]:
    """Versions of the packages that an artifact is made with."""
    modules: list[Any] = [sbert_infer, torch, transformers, tokenizers, onnxruntime]
    return {module.__name__: module.__version__ for module in modules}
