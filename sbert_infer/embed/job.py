"""A job: which texts, model and vectors. If any of them changes, earlier parts are useless."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from sbert_infer.artifact.exports import open_model
from sbert_infer.artifact.fingerprint import fingerprint
from sbert_infer.artifact.manifest import ENCODER, Artifact, check_kind, check_one_route
from sbert_infer.backends.choice import NoChoiceError, recall
from sbert_infer.embed.embedder import Vectors
from sbert_infer.embed.read.rows import Columns
from sbert_infer.embed.read.sources import Source, find_sources
from sbert_infer.embed.reuse import EarlierOutput, earlier_outputs
from sbert_infer.embed.write.origin import Origin
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.encode.self_check import Verify
from sbert_infer.errors import EmbedError
from sbert_infer.opening import Compute

# A row group of 25 MB for MiniLM's 384 dimensions; half a minute of work on two cores.
PART_TEXTS = 4 * WINDOW_TEXTS


@dataclass(frozen=True)
class Job:
    """What a command line asks for, except how to run it and how to store the output."""

    sources: tuple[Source, ...]
    model: Artifact
    columns: Columns
    vectors: Vectors
    device: str | None = None
    part_texts: int = PART_TEXTS
    limit: int | None = None
    reuse: tuple[str, ...] = ()
    verify: Verify = "once"
    compute: Compute | None = None

    @cached_property
    def artifact(self) -> Artifact:
        """What runs: the model, or what `sbert-tune` has chosen in its place."""
        if self.compute is not None:
            with suppress(NoChoiceError):  # opening the engine warns
                return recall(self.model)[1]
        return self.model

    @cached_property
    def origin(self) -> Origin:
        """From what the vectors will be made. Raise if the model can't do the job."""
        check_kind(self.model, (ENCODER,), "sbert-embed")
        check_one_route(self.model, "sbert-embed")
        manifest, vectors = self.model.manifest, self.vectors
        if vectors.prompt_name not in (None, *manifest.prompts):
            there = ", ".join(manifest.prompts) or "none"
            raise EmbedError(f"{self.model.path} has no prompt {vectors.prompt_name!r} (there are: {there})")
        name = manifest.default_prompt_name if vectors.prompt_name is None else vectors.prompt_name
        named = "" if name is None else manifest.prompts[name]
        return Origin(
            fingerprint(self.artifact),
            prompt=named if vectors.prompt is None else vectors.prompt,
            dim=min(vectors.truncate_dim or manifest.truncate_dim or manifest.dim, manifest.dim),
            normalize=vectors.normalize,
            precision=vectors.precision,
            text_column=self.columns.text,
            embedding_column=self.columns.embedding,
        )

    @cached_property
    def earlier_outputs(self) -> list[EarlierOutput]:
        """The outputs whose vectors are used again. Raise if they can't be."""
        return earlier_outputs(self.reuse, self.origin)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that the parts depend on, by name. Raise if the model can't do the job."""
        parts = self.origin.fingerprint.parts
        options = {**asdict(self.columns), **asdict(self.vectors)}
        return {
            "version": 1,
            "artifact": self.artifact.sha256,
            **{f"model {part}": value for part, value in parts.items()},
            **{f"input {source.path}": [source.format, source.size, source.modified_ns] for source in self.sources},
            **{f"reuse {path}": [path.stat().st_size, path.stat().st_mtime_ns] for path, _, _ in self.earlier_outputs},
            "inputs": hashlib.sha256(repr([source.path for source in self.sources]).encode()).hexdigest(),
            **{name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
            "device": self.device,
            "part rows": self.part_texts,
            "limit": self.limit,
        }


def make_job(inputs: Sequence[str], model: str, options: Mapping[str, Any]) -> Job:
    """Make the job that the options of `sbert-embed` describe."""
    names = options["columns"]
    carried = None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())
    return Job(
        sources=tuple(find_sources(inputs, options["input_format"])),
        model=open_model(model, model_precision=options["model_precision"]),
        columns=Columns(
            options["text_column"], options["id_column"], carried, options["embedding_column"], options["header"]
        ),
        vectors=Vectors(**{field.name: options[field.name] for field in fields(Vectors)}),
        device=options["device"],
        part_texts=options["part_rows"],
        limit=options["limit"],
        reuse=options["reuse"],
        verify=options["verify"],
        compute=options["compute"],
    )
