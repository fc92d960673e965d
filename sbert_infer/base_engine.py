"""The base of `Engine` and `Reranker`: opening an artifact, prompts, limits, running, closing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.exports import open_model
from sbert_infer.artifact.fingerprint import Fingerprint, fingerprint
from sbert_infer.artifact.manifest import RERANKER, Artifact, Manifest, check_kind
from sbert_infer.backends.base import Backend
from sbert_infer.backends.devices import Device, DeviceName
from sbert_infer.backends.select import BackendOptions, PassedOver
from sbert_infer.encode.open_pipeline import load_tokenizer
from sbert_infer.encode.options import EncodeOptions, given
from sbert_infer.encode.output import EncodeStats, Output, Window
from sbert_infer.encode.pipeline import Pipeline, Progress, no_progress
from sbert_infer.encode.self_check import SelfCheck, Verify
from sbert_infer.errors import EngineError, warn
from sbert_infer.module_interface import ModuleInterface
from sbert_infer.opening import Compute, open_backend_again, open_pipeline
from sbert_infer.text.hugging_face import BatchEncoding, HuggingFaceTokenizer
from sbert_infer.text.inputs import as_list, as_pairs, as_texts, check_on_truncate, check_pairs, check_text, prepend
from sbert_infer.text.tokenizer import Tokenizer
from sbert_infer.types import OnTruncate, Text

Self = TypeVar("Self", bound="BaseEngine")

# Options of `BackendOptions` that a copy is opened with.
COPIED_OPTIONS = ("device", "strict", "workers", "threads", "max_batch_tokens")
# The prompts for queries and for documents, the preferred name first, as sentence-transformers has
# it.
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


class BaseEngine(ModuleInterface):
    """An open model, closed by `close` or at the end of a `with` block."""

    kinds: tuple[str, ...]  # kinds of artifacts that this class opens
    artifact: Artifact
    prompts: dict[str, str]
    default_prompt_name: str | None
    last_stats: EncodeStats  # of the last call
    model_card_data: Any  # an `EvaluationMetrics`, or what the user sets instead
    settings: tuple[str, ...] = ("prompts", "default_prompt_name", "max_seq_length")  # that users may change
    _options: BackendOptions
    _self_check: SelfCheck
    _pipeline: Pipeline | None  # None once closed
    _compute: str | None
    _tokenizer: HuggingFaceTokenizer | None
    _on_truncate: OnTruncate

    def __init__(
        self,
        path: str | os.PathLike[str] | Artifact | None = None,
        *,
        model_name_or_path: str | os.PathLike[str] | None = None,
        device: Device = None,
        strict: bool = False,
        on_truncate: OnTruncate = "warn",
        workers: int | None = None,
        threads: int | None = None,
        max_batch_tokens: int | None = None,
        verify: Verify = "once",
        compute: Compute | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        revision: str | None = None,
        model_precision: str | None = None,
        passed_over: PassedOver = lambda choice, why: None,
        **settings: Any,
    ) -> None:
        """Open the model at `path`.

        Args:
            path: a file written by `sbert-export`, or an artifact that is already open; or a
                checkpoint, by its folder or its name on the Hugging Face hub, which is exported
                into the user's cache folder when it is first opened.
            model_name_or_path: `path`, as sentence-transformers calls it.
            device: "cpu", "cuda", "cuda:1", or a list of GPUs. By default a plan runs on the first
                GPU, or on the CPU with a warning if there is none; an ONNX model runs on the CPU.
            strict: raise, instead of warning, if a plan has no TensorRT engine for this GPU, or if
                a BF16 model can't run in BF16.
            on_truncate: what to do when a text is longer than the model's limit: "warn" once per
                call, raise an "error", or "ignore" it.
            workers: batches that run at once on a CPU; by default, one for each usable core.
            threads: cores that share one batch; 1 by default, which is fastest for many texts.
            max_batch_tokens: tokens that run together, padding included; by default, what is
                fastest on the backend.
            verify: when to compare the vectors of this machine with those of the eager model, which
                the artifact holds for some texts: "once" for each artifact, backend and machine,
                "always", or "never". A backend that gives wrong vectors is not used.
            compute: "auto" opens what `sbert-tune` has chosen for this file on this machine, which
                may be another file of the same checkpoint. If there is no choice that still holds,
                a warning says so, and the file runs as by default.
            prompts: prompts by name, in addition to the model's own or in their place.
            default_prompt_name: the prompt that `encode` uses by default.
            revision: branch, tag or commit of a model on the hub; "NAME@REVISION" means the same.
            model_precision: to which precision to export a checkpoint: "fp32", the default, "int8",
                "bf16" or "fp16".
            passed_over: called with the name of each better way to run a plan that is not taken,
                and why.
            settings: values for the attributes in `settings`, such as `truncate_dim`; None leaves
                the model's own.

        """
        if unknown := settings.keys() - set(self.settings):
            known = ", ".join(self.settings)
            raise TypeError(f"{type(self).__name__} has no option {min(unknown)!r}; settings: {known}")
        self.on_truncate = on_truncate
        for name, value in (("workers", workers), ("threads", threads), ("max_batch_tokens", max_batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        path = given(path, model_name_or_path, f"{type(self).__name__} needs the path of a model")
        artifact = open_model(path, revision=revision, model_precision=model_precision)
        check_kind(artifact, self.kinds, type(self).__name__)
        self.prompts = {**artifact.manifest.prompts, **(prompts or {})}
        self.default_prompt_name = default_prompt_name or artifact.manifest.default_prompt_name
        self.resolve_prompt(None, None)  # raises if there is no such prompt
        options = BackendOptions(device, strict, workers, threads, max_batch_tokens, passed_over=passed_over)
        opened = open_pipeline(artifact, options, verify, compute)
        self.artifact, self._options, self._self_check = opened.artifact, opened.options, opened.check
        self._pipeline = opened.pipeline
        self._compute = opened.compute
        self._tokenizer = None
        self.last_stats = EncodeStats()
        self.model_card_data = EvaluationMetrics(self.artifact)
        self._apply(self.manifest)
        for name, value in settings.items():
            if value is not None:
                setattr(self, name, value)

    def _apply(self, manifest: Manifest) -> None:
        """Take the settings that only this kind of engine has from the manifest."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs the texts. Raises if the engine is closed."""
        if self._pipeline is None:
            raise EngineError(f"this engine is closed: {self.artifact.path}")
        return self._pipeline

    @property
    def on_truncate(self) -> OnTruncate:
        """What to do when a text is longer than the model's limit: "warn", "error" or "ignore"."""
        return self._on_truncate

    @on_truncate.setter
    def on_truncate(self, value: OnTruncate) -> None:
        check_on_truncate(value)
        self._on_truncate = value

    @property
    def max_seq_length(self) -> int:
        """The limit on a text's tokens, special ones included.

        It may be lowered, or raised as far as the model has positions. The artifact's certificate
        is for texts up to the original limit.
        """
        return self.pipeline.tokenizer.max_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._check_max_seq_length(value)
        self.pipeline.tokenizer = load_tokenizer(self.artifact, value)

    def _check_max_seq_length(self, value: int) -> None:
        limit = max(self.manifest.max_length, self.manifest.max_positions or 0)
        if not 3 <= value <= limit:
            raise ValueError(f"max_seq_length must be between 3 and the model's limit of {limit}, got {value}")

    @property
    def tokenizer(self) -> HuggingFaceTokenizer:
        """The model's tokenizer, with the interface of Hugging Face's."""
        limit, manifest = self.max_seq_length, self.manifest
        if self._tokenizer is None or self._tokenizer.model_max_length != limit:
            known = manifest.tokenizer or {}
            self._tokenizer = HuggingFaceTokenizer(
                self.artifact.tokenizer_json,
                model_max_length=limit,
                pad_token_id=manifest.pad_id,
                padding_side=manifest.padding_side,
                truncation_side=manifest.truncation_side,
                model_input_names=known.get("input_names", ("input_ids", "attention_mask")),
                special_tokens=known.get("special_tokens"),
            )
        return self._tokenizer

    def is_singular_input(self, inputs: Any) -> bool:
        """Return whether these are one text, or one pair, and not several."""
        return (as_pairs if self.manifest.kind == RERANKER else as_texts)(inputs)[1]

    def preprocess(self, inputs: Sequence[Text], prompt: str | None = None) -> BatchEncoding:
        """Return the token ids and attention mask of texts, cut to the model's limit and padded.

        They are tensors if the caller has imported torch, arrays with a tensor's methods otherwise.
        """
        if self.manifest.kind == RERANKER:
            check_pairs(inputs)
        else:
            inputs = as_list(inputs, "preprocess")
        kind = "pt" if "torch" in sys.modules else "np"
        return self.tokenizer(prepend(prompt or "", inputs), padding=True, truncation=True, return_tensors=kind)

    def tokenize(self, texts: Sequence[Text]) -> BatchEncoding:
        """Return the token ids of texts: the old name of `preprocess`."""
        return self.preprocess(texts)

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest: model, pooling, prompts, parity certificate, versions."""
        return self.artifact.manifest

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hashes of all that the artifact's vectors depend on; see `artifact/fingerprint.py`."""
        return fingerprint(self.artifact)

    @property
    def device(self) -> DeviceName:
        """The device the model runs on: "cpu", "cuda:0" or "cuda:0,cuda:1"."""
        return DeviceName(self.pipeline.backend.device)

    @property
    def info(self) -> dict[str, Any]:
        """A summary of what runs: file, model, precision, backend, limits."""
        backend = self.pipeline.backend
        return {
            "path": str(self.artifact.path),
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
            "fingerprint": self.fingerprint.exact,
            "verified": asdict(self._self_check.verdict),
            "compute": self._compute,
        }

    def get_max_seq_length(self) -> int:
        """Return `max_seq_length`."""
        return self.max_seq_length

    def replace_backend(self) -> Backend:
        """Open the model again for later calls, and return the backend used so far, still open.

        This replaces a backend that hangs or is broken; calls that are already inside it stay
        there.
        """
        pipeline = self.pipeline
        before, backend = pipeline.backend, open_backend_again(self.artifact, self._options)
        if (backend.device, backend.packer, backend.workers) != (before.device, before.packer, before.workers):
            backend.close()
            raise EngineError(f"{self.artifact.path} would now run with {backend.describe()}: open a new Engine")
        pipeline.backend = backend
        return before

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._pipeline is None

    def close(self) -> None:
        """Stop the workers and free the model. A second call does nothing."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
            pipeline.backend.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the path and the settings; the file is opened again."""
        _ = self.pipeline  # a closed engine can't be copied
        options = {name: getattr(self._options, name) for name in COPIED_OPTIONS}
        settings = {name: getattr(self, name) for name in self.settings}
        path = self.artifact.path.absolute()  # the other process may be in another folder
        options |= {"on_truncate": self.on_truncate, "verify": self._self_check.verify}
        return _reopen, (type(self), path, options, settings, self.manifest, self._compute)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._pipeline is None else self._pipeline.backend.describe()
        return f"{type(self).__name__}({str(self.artifact.path)!r}, {self.manifest.precision}, {state})"

    def resolve_prompt(self, prompt: str | None, prompt_name: str | None) -> str:
        """Return the text of the prompt: `prompt`, the prompt of that name, or the default one."""
        if prompt is not None:
            check_text(prompt, "prompt")
            if prompt_name is not None:
                warn(f"prompt and prompt_name are both given: prompt_name {prompt_name!r} has no effect, leave it out")
            return prompt
        name = prompt_name if prompt_name is not None else self.default_prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            raise ValueError(f"prompt_name {name!r} is not among the model's prompts: {sorted(self.prompts)}")
        return self.prompts[name]

    def prompt_name_for(self, task: str) -> str | None:
        """Return the name of the prompt for a "query" or a "document", None if there is none."""
        return next((name for name in _PROMPT_NAMES[task] if name in self.prompts), None)

    def tokenizer_of_other_side(self, max_length: int) -> Tokenizer:
        """Load a tokenizer that cuts long texts at the opposite end from the model's own."""
        other = "left" if self.manifest.truncation_side == "right" else "right"
        return load_tokenizer(self.artifact, max_length, other)

    def _run(
        self,
        texts: Iterable[Text],
        output: Output,
        options: EncodeOptions,
        progress: Progress = no_progress,
    ) -> Iterator[Window]:
        """Run `texts`, record the statistics, and warn about truncated texts."""
        pipeline, stats = self.pipeline, EncodeStats()
        windows = pipeline.run(
            texts,
            output,
            prompt=options.prompt,
            prompt_length=0 if self.manifest.include_prompt else pipeline.tokenizer.prompt_length(options.prompt),
            max_batch_texts=options.batch_size,
            allow_truncation=self.on_truncate != "error",
            progress=progress,
        )
        for window in windows:
            stats += window.stats
            yield window
        self.last_stats = stats
        if stats.truncated and self.on_truncate == "warn":
            limit = output.max_length or self.max_seq_length
            cut = f"{stats.truncated} of {stats.texts} {pipeline.noun}s were cut to {limit} tokens"
            warn(f"{cut}; see {type(self).__name__}(on_truncate=...)")


def _reopen(
    kind: type[Self],
    path: Path,
    options: dict[str, Any],
    settings: dict[str, Any],
    manifest: Manifest,
    compute: str | None,
) -> Self:
    """Open the engine that was pickled or copied."""
    artifact = open_artifact(path)
    if artifact.manifest != manifest:
        raise EngineError(f"{path} is another model than the one that was pickled or copied")
    engine = kind(artifact, **options)
    engine._compute = compute
    for name, value in settings.items():
        if getattr(engine, name) != value:
            setattr(engine, name, value)
    return engine


class EvaluationMetrics:
    """Results of sentence-transformers' evaluators, at `engine.model_card_data.metrics`."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self.metrics: dict[str, float] = {}

    @property
    def base_model(self) -> str:
        """The name under which sentence-transformers' `mine_hard_negatives` caches vectors."""
        manifest = self._artifact.manifest
        return f"{manifest.name} {fingerprint(self._artifact).exact} {manifest.precision}"

    def set_evaluation_metrics(
        self, evaluator: object, metrics: dict[str, float], epoch: int = 0, step: int = 0
    ) -> None:
        """Store the results of an evaluator, which calls this when it is done."""
        self.metrics.update(metrics)
