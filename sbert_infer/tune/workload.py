"""The texts that are timed: those of a file, or else the canaries, numbered so that all differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sbert_infer.artifact.canaries import Canaries
from sbert_infer.artifact.manifest import RERANKER, Manifest
from sbert_infer.errors import EmbedError
from sbert_infer.types import Text

_NUMBERED = 1024


@dataclass(frozen=True)
class Workload:
    """Texts, or pairs of texts, and the role that they have for a multi-vector encoder."""

    texts: Sequence[Text]
    task: str | None
    source: str


def make_workload(manifest: Manifest, canaries: Canaries, file: Path | None, text_column: str) -> Workload:
    """Return the texts of `file`; for a reranker, each with the one after it as a pair."""
    task = canaries.tasks[-1]  # documents come last
    if file is None:
        own = [text for text, its in zip(canaries.texts, canaries.tasks, strict=True) if its == task]
        texts = [_numbered(own[number % len(own)], number) for number in range(_NUMBERED)]
        return Workload(texts, task, "canaries")
    try:
        from sbert_infer.embed.read.parts import first_texts
    except ImportError as error:
        what = f"{error.name} is not installed, --texts needs it"
        raise EmbedError(f"{what}: pip install 'sbert-infer[embed]'") from error
    found = [text for text in dict.fromkeys(first_texts(file, text_column)) if text.strip()]
    pairs: list[Text] = list(pairwise(found))
    texts = pairs if manifest.kind == RERANKER else list(found)
    if not texts:
        raise EmbedError(f"{file} has no texts" if not found else f"{file} has one text, and a reranker needs pairs")
    return Workload(texts, task, file.name)


def _numbered(text: Text, number: int) -> Text:
    if isinstance(text, str):
        return f"{text} {number}"
    first, second = text
    return first, f"{second} {number}"
