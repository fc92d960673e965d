"""What is open of an artifact: its tokenizer, its backend, its prompts and limits, and how texts run through them.

`Engine`, `Reranker` and `AsyncEngine` share it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import RERANKER, Artifact, Manifest, check_kind
from sbert_infer.backends.base import Backend
from sbert_infer.backends.devices import Device
from sbert_infer.backends.select import BackendOptions, open_backend
from sbert_infer.encode.multi_vector import check_multi_vector
from sbert_infer.encode.pipeline import EncodeStats, Pipeline, Window
from sbert_infer.errors import ArtifactError, EngineError, warn
from sbert_infer.text.inputs import check_text
from sbert_infer.text.pair_tokenizer import PairTokenizer
from sbert_infer.text.tokenizer import Tokenizer
from sbert_infer.types import OnTruncate, Text

__all__ = ["EvaluationMetrics", "OpenModel"]

Self = TypeVar("Self", bound="OpenModel")


class OpenModel:
    """A model that is open. It is closed by `close`, or at the end of a `with`."""

    _kinds: tuple[str, ...]  # of artifacts that it opens
    _name: str  # in messages

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: Device = None,
        strict: bool = False,
        on_truncate: OnTruncate = "warn",
        workers: int | None = None,
        threads: int | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        """Open the artifact at `path`.

        Args:
            path: a file written by `sbert-export`.
            device: "cpu", "cuda", "cuda:1", or a list of GPUs. By default a plan runs on the first
                GPU, or on the CPU with a warning where there is none; an ONNX model runs on the
                CPU.
            strict: raise, instead of that warning, where a plan can't run with an engine made for
                this GPU.
            on_truncate: what to do when a text is longer than the model's limit: warn once per
                call, raise, or nothing.
            workers: batches that run at once on a CPU; as many as there are usable cores by
                default.
            threads: cores that share one batch; 1 by default, which is fastest for many texts.
            max_batch_tokens: tokens that run together, padding included; the backend's best by
                default.

        """
        if on_truncate not in ("warn", "error", "ignore"):
            raise ValueError(f"on_truncate must be 'warn', 'error' or 'ignore', got {on_truncate!r}")
        for name, value in (("workers", workers), ("threads", threads), ("max_batch_tokens", max_batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        artifact = open_artifact(path)
        check_kind(artifact, self._kinds, self._name)
        manifest = artifact.manifest
        self.on_truncate: OnTruncate = on_truncate
        self.prompts: dict[str, str] = dict(manifest.prompts)
        self.default_prompt_name = manifest.default_prompt_name
        self.truncate_dim = manifest.truncate_dim
        self.last_stats = EncodeStats()
        self.model_card_data = EvaluationMetrics()
        self._similarity_fn_name = manifest.similarity
        self._artifact: Artifact = artifact
        self._options = BackendOptions(device, strict, workers, threads, max_batch_tokens)
        self._pipeline: Pipeline | None = Pipeline(
            _load_tokenizer(artifact, manifest.max_length, manifest.truncation_side),
            open_backend(artifact, self._options),
            dim=manifest.dim,
            pad_id=manifest.pad_id,
            padding_side=manifest.padding_side,
            pairs=manifest.kind == RERANKER,
        )

    @property
    def max_seq_length(self) -> int:
        """The most tokens of a text that count, special ones included. May be lowered."""
        return self._open().tokenizer.max_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        check_multi_vector(self.manifest, "max_seq_length")
        limit = self.manifest.max_length
        if not 3 <= value <= limit:
            raise ValueError(f"max_seq_length must be between 3 and the model's limit of {limit}, got {value}")
        self._open().tokenizer = _load_tokenizer(self._artifact, value, self.manifest.truncation_side)

    @property
    def tokenizer(self) -> Any:
        """The underlying `tokenizers.Tokenizer`."""
        return self._open().tokenizer.backend

    @property
    def manifest(self) -> Manifest:
        """What the artifact says of itself: model, pooling, prompts, parity certificate, versions."""
        return self._artifact.manifest

    @property
    def device(self) -> str:
        """Where the model runs: "cpu", "cuda:0" or "cuda:0,cuda:1"."""
        return self._open().backend.device

    @property
    def info(self) -> dict[str, Any]:
        """What runs: file, model, precision, backend, limits."""
        backend = self._open().backend
        return {
            "path": str(self._artifact.path),
            "model": self.manifest.name,
            "precision": self.manifest.precision,
            "backend": backend.describe(),
            "device": backend.device,
            "dim": self.manifest.dim,
            "max_length": self.max_seq_length,
            "workers": backend.workers,
            "threads": backend.threads,
            "max_batch_tokens": backend.max_batch_tokens,
            "parity": dict(self.manifest.parity),
        }

    def get_max_seq_length(self) -> int:
        """The same as `max_seq_length`."""
        return self.max_seq_length

    def replace_backend(self) -> Backend:
        """Open the model once more, let later calls use that, and return what they would have used, still open.

        For a backend that hangs or is broken: calls that are inside it stay there.
        """
        pipeline = self._open()
        artifact = open_artifact(self._artifact.path)
        if artifact.manifest != self.manifest:
            raise EngineError(f"{artifact.path} is another model than the one that was opened: open a new Engine")
        before, backend = pipeline.backend, open_backend(artifact, self._options)
        if (backend.device, backend.edges, backend.workers) != (before.device, before.edges, before.workers):
            backend.close()
            raise EngineError(f"{artifact.path} would now run with {backend.describe()}: open a new Engine")
        pipeline.backend = backend
        return before

    def close(self) -> None:
        """Stop the workers and free the model. A second call does nothing."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
            pipeline.backend.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._pipeline is None else self._pipeline.backend.describe()
        return f"{self._name}({str(self._artifact.path)!r}, {self.manifest.precision}, {state})"

    def _windows(
        self,
        texts: Iterable[Text],
        prompt: str,
        batch_size: int | None,
        progress: Callable[[int], object],
        rows: Callable[[int], Any] | None = None,
    ) -> Iterator[Window]:
        """Run `texts`, deal with truncation and keep the statistics."""
        pipeline = self._open()
        skip = 0 if self.manifest.include_prompt else pipeline.tokenizer.prompt_length(prompt)
        stats = EncodeStats()
        windows = pipeline.run(
            texts,
            prompt=prompt,
            prompt_length=skip,
            max_batch_texts=batch_size,
            allow_truncation=self.on_truncate != "error",
            progress=progress,
            rows=rows,
        )
        for window in windows:
            stats += window.stats
            yield window
        self.last_stats = stats
        if stats.truncated and self.on_truncate == "warn":
            cut = f"{stats.truncated} of {stats.texts} {pipeline.noun}s were cut to {self.max_seq_length} tokens"
            warn(f"{cut}; see {self._name}(on_truncate=...)")

    def _open(self) -> Pipeline:
        if self._pipeline is None:
            raise EngineError(f"this engine is closed: {self._artifact.path}")
        return self._pipeline

    def _tokenizer_of_other_side(self, max_length: int) -> Tokenizer:
        """One that cuts long texts where the model's own does not. Loading it takes a moment."""
        other = "left" if self.manifest.truncation_side == "right" else "right"
        return _load_tokenizer(self._artifact, max_length, other)

    def _resolve_prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        if prompt is not None:
            check_text(prompt, "prompt")
            return prompt
        name = prompt_name if prompt_name is not None else self.default_prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            raise ValueError(f"prompt_name {name!r} is not among the model's prompts: {sorted(self.prompts)}")
        return self.prompts[name]

    def _resolve_dim(self, truncate_dim: int | None) -> int:
        wanted = truncate_dim if truncate_dim is not None else self.truncate_dim
        if wanted is not None and wanted < 1:
            raise ValueError(f"truncate_dim must be at least 1, got {wanted}")
        return self.manifest.dim if wanted is None else min(wanted, self.manifest.dim)


class EvaluationMetrics:
    """Where sentence-transformers' evaluators leave their results (`engine.model_card_data.metrics`)."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def set_evaluation_metrics(self, evaluator: object, metrics: dict[str, float], *_: object) -> None:
        """Called by an evaluator when it is done."""
        self.metrics.update(metrics)


def _load_tokenizer(artifact: Artifact, max_length: int, side: str) -> Tokenizer:
    try:
        manifest = artifact.manifest
        if manifest.kind == RERANKER:
            return PairTokenizer(artifact.tokenizer_json, max_length, side, token_types=manifest.token_types)
        return Tokenizer(artifact.tokenizer_json, max_length, side)
    except Exception as error:  # tokenizers raises nothing more precise
        raise ArtifactError(f"{artifact.path}: the installed tokenizers can't read its tokenizer: {error}") from error
