"""Opening: from an artifact to the pipeline that runs it, by default or as `sbert-tune` chose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.manifest import Artifact
from sbert_infer.backends.base import Backend
from sbert_infer.backends.choice import NoChoiceError, recall
from sbert_infer.backends.select import BackendOptions, open_backend
from sbert_infer.encode.open_pipeline import load_tokenizer, make_pipeline
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.encode.self_check import SelfCheck, Verify
from sbert_infer.errors import EngineError, SbertInferError, warn

Compute = Literal["auto"]


@dataclass(frozen=True)
class Opened:
    """An artifact, what runs it, and why that."""

    artifact: Artifact
    options: BackendOptions
    check: SelfCheck
    pipeline: Pipeline
    compute: str | None = None  # with "auto": what was chosen, or why nothing was

    def close(self) -> None:
        """Stop the workers and free the model."""
        self.pipeline.close()
        self.pipeline.backend.close()


def open_pipeline(
    artifact: Artifact, options: BackendOptions, verify: Verify = "once", compute: Compute | None = None
) -> Opened:
    """Open `artifact` with these options, or with "auto" what `sbert-tune` has chosen for it.

    Where there is no choice that holds, a warning says so, and how to make one.
    """
    if compute is None:
        tokenizer = load_tokenizer(artifact)
        check = SelfCheck(artifact, verify, tokenizer)
        options = replace(options, accept=check)
        return Opened(artifact, options, check, make_pipeline(artifact, tokenizer, open_backend(artifact, options)))
    if compute != "auto":
        raise ValueError(f'compute must be "auto" or None, got {compute!r}')
    for name in ("device", "workers", "threads", "max_batch_tokens"):
        if getattr(options, name) is not None:
            raise ValueError(f'{name} is chosen with compute="auto": leave one of them out')
    try:
        return _open_chosen(artifact, options, verify)
    except NoChoiceError as error:
        opened = open_pipeline(artifact, options, verify)
        backend = opened.pipeline.backend.describe()
        warn(f"{artifact.path} runs as by default, with {backend}: {error}; run: {error.command}")
        return replace(opened, compute=f"the default: {error}")


def open_backend_again(artifact: Artifact, options: BackendOptions) -> Backend:
    """Open another backend for an open artifact; raise if its file holds another model now."""
    again = open_artifact(artifact.path)
    if again.manifest != artifact.manifest:
        raise EngineError(f"{again.path} is another model than the one that was opened: open a new Engine")
    return open_backend(again, options)


def _open_chosen(artifact: Artifact, options: BackendOptions, verify: Verify) -> Opened:
    choice, chosen = recall(artifact)
    options = replace(choice.options, strict=options.strict, passed_over=options.passed_over)
    try:
        opened = open_pipeline(chosen, options, verify)
    except SbertInferError as error:
        raise NoChoiceError(f"what sbert-tune chose does not run: {error}", choice.command) from error
    if (found := opened.pipeline.backend.describe()) != choice.backend:
        opened.close()
        raise NoChoiceError(f"what sbert-tune chose would run with {found}, not {choice.backend}", choice.command)
    return replace(opened, compute=f"{choice}, as sbert-tune chose")
