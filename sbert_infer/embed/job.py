"""A job: which texts, which model, which vectors. If any of it changes, parts of an earlier run are of no use."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.onnx_file import sha256
from sbert_infer.embed.read.rows import Columns
from sbert_infer.embed.read.sources import Source
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.errors import EmbedError

__all__ = ["PART_TEXTS", "Job", "Vectors"]

PART_TEXTS = 4 * WINDOW_TEXTS  # a row group of 25 MB for MiniLM's 384 numbers; half a minute of work on two cores


@dataclass(frozen=True)
class Vectors:
    """Which vectors of the model to write."""

    precision: str = "float32"
    normalize: bool = False
    truncate_dim: int | None = None
    prompt_name: str | None = None
    prompt: str | None = None


@dataclass(frozen=True)
class Job:
    """What a command line asks for, except how fast, and how its output is packed."""

    sources: tuple[Source, ...]
    artifact: Path
    columns: Columns
    vectors: Vectors
    device: str | None = None
    part_texts: int = PART_TEXTS
    limit: int | None = None

    def fingerprint(self) -> dict[str, Any]:
        """By name, everything that the parts depend on. Raises if the model can't do what is wanted."""
        prompts = open_artifact(self.artifact).manifest.prompts
        if self.vectors.prompt_name not in (None, *prompts):
            there = ", ".join(prompts) or "none"
            raise EmbedError(f"{self.artifact} has no prompt {self.vectors.prompt_name!r} (there are: {there})")
        with self.artifact.open("rb") as file:
            digest = sha256(file)
        options = {**asdict(self.columns), **asdict(self.vectors)}
        return {
            "version": 1,
            "artifact": digest,
            **{f"input {source.path}": source.identity[1:] for source in self.sources},
            "inputs": hashlib.sha256(repr([source.path for source in self.sources]).encode()).hexdigest(),
            **{name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
            "device": self.device,
            "part rows": self.part_texts,
            "limit": self.limit,
        }
