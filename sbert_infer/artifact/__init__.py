"""Artifact files: the contract between export and runtime."""

from __future__ import annotations

import os
from pathlib import Path

from sbert_infer.artifact.manifest import Artifact
from sbert_infer.artifact.onnx_file import open_onnx_file
from sbert_infer.artifact.plan_file import is_plan, open_plan
from sbert_infer.errors import ArtifactError

__all__ = ["open_artifact"]


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Check the artifact at `path`, an ONNX model or a plan, and read its manifest and tokenizer."""
    path = Path(path)
    if path.is_dir():
        raise ArtifactError(f"{path} is a folder, not an artifact: run `sbert-export {path}` first")
    return open_plan(path) if is_plan(path) else open_onnx_file(path)
