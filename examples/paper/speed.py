"""Time finding the most similar two of many sentences, by cross-encoder and by bi-encoder."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from examples.paper.models import bi_encoder, cross_encoder
from sbert_infer import Engine, Reranker
from sbert_infer.export.exporter import export

__all__ = ["HEADER", "Pair", "Speed", "Timings", "measure_speed", "most_similar", "row"]

MAX_TOKENS = 128
BATCH_SIZE = 32  # the default of sentence-transformers
WARM_UP = 64  # texts or pairs that are not timed
BLOCK = 1000  # sentences compared with all others at once
TOLERANCE = 1e-4  # between the results of the two libraries
HEADER = """\
| how | per second | for all | measured on |
|---|--:|--:|---|"""

Vectors = npt.NDArray[np.float32]
Say = Callable[[str], object]


class Pair(NamedTuple):
    """Two sentences, by index, and their cosine."""

    left: int
    right: int
    score: float


@dataclass(frozen=True)
class Timings:
    """How long one method took for `measured` of `total` texts or pairs."""

    how: str
    unit: str
    measured: int
    total: int
    seconds: float

    @property
    def total_seconds(self) -> float:
        """Seconds for all of them, at the same rate."""
        return self.seconds * self.total / self.measured


@dataclass
class Speed:
    """A row for each method, and the pair that was found."""

    rows: list[Timings] = field(default_factory=list)
    best: Pair | None = None

    def time(self, how: str, unit: str, run: Callable[[Any], Any], items: Sequence[Any], total: int) -> Any:
        """Time a run and add a row; return its result."""
        run(items[:WARM_UP])
        start = time.perf_counter()
        result = run(items)
        self.rows.append(Timings(how, unit, len(items), total, time.perf_counter() - start))
        return result


def measure_speed(base: str, texts: Sequence[str], num_pairs: int, num_sample: int, folder: Path, say: Say) -> Speed:
    """Time a sample of pairs, a sample of texts as given and sorted, and all texts in `Engine`."""
    rng = random.Random(0)  # noqa: S311 - it must be repeatable
    speed = Speed()
    _compare_pairs(speed, base, [tuple(rng.sample(texts, 2)) for _ in range(num_pairs)], len(texts), folder, say)
    vectors = _compare_texts(speed, base, texts, rng.sample(range(len(texts)), num_sample), folder, say)
    count = len(texts) * (len(texts) - 1) // 2
    start = time.perf_counter()
    speed.best = most_similar(vectors)
    speed.rows.append(Timings("bi-encoder: then the cosines", "pairs", count, count, time.perf_counter() - start))
    return speed


def _compare_pairs(speed: Speed, base: str, pairs: Sequence[Any], num_texts: int, folder: Path, say: Say) -> None:
    total = num_texts * (num_texts - 1) // 2
    say("exporting the cross-encoder")
    eager = cross_encoder(base, MAX_TOKENS)
    with Reranker(_exported(eager, folder / "cross-encoder"), on_truncate="ignore") as reranker:
        say("timing cross-encoders")
        expected = speed.time("cross-encoder: sentence-transformers", "pairs", eager.predict, pairs, total)
        scores = speed.time("cross-encoder: Reranker", "pairs", reranker.predict, pairs, total)
    _check_equal("Reranker", scores, expected)


def _compare_texts(
    speed: Speed, base: str, texts: Sequence[str], sample: Sequence[int], folder: Path, say: Say
) -> Vectors:
    """Time the bi-encoders; return the vectors of all texts."""
    say("exporting the bi-encoder")
    eager = bi_encoder(base, "mean", MAX_TOKENS)
    name, some = "bi-encoder: sentence-transformers", [texts[index] for index in sample]
    with Engine(_exported(eager, folder / "bi-encoder"), on_truncate="ignore") as engine:
        say("timing bi-encoders")
        as_given = speed.time(f"{name}, batches as given", "texts", _unsorted(eager.encode), some, len(texts))
        expected = speed.time(f"{name}, sorted by length", "texts", eager.encode, some, len(texts))
        vectors: Vectors = speed.time("bi-encoder: Engine", "texts", engine.encode, texts, len(texts))
    _check_equal("batches as given", as_given, expected)
    _check_equal("Engine", vectors[sample], expected)
    return vectors


def _unsorted(encode: Callable[[Sequence[str]], Vectors]) -> Callable[[Sequence[str]], Vectors]:
    """Encode one batch at a time, since `encode` sorts all texts of a call."""
    return lambda texts: np.concatenate(
        [encode(texts[start : start + BATCH_SIZE]) for start in range(0, len(texts), BATCH_SIZE)]
    )


def _exported(model: Any, folder: Path) -> Path:
    artifact = folder.with_suffix(".onnx")
    model.save_pretrained(str(folder), create_model_card=False)
    export(folder, artifact)
    return artifact


def _check_equal(name: str, given: Vectors, expected: Vectors) -> None:
    if (off := float(np.abs(given - expected).max())) > TOLERANCE:
        raise RuntimeError(f"{name}: what was timed is wrong, off by {off:.1e}")


def most_similar(vectors: Vectors) -> Pair:
    """Find the two rows with the highest cosine, in blocks so that memory stays flat."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    best = Pair(0, 0, -2.0)
    for start in range(0, len(unit), BLOCK):
        scores = unit[start : start + BLOCK] @ unit[start:].T  # [block, block and those after it]
        scores[np.tril_indices(len(scores), m=len(unit) - start)] = -2  # itself, and pairs already seen
        left, right = np.unravel_index(scores.argmax(), scores.shape)
        if scores[left, right] > best.score:
            best = Pair(start + int(left), start + int(right), float(scores[left, right]))
    return best


def row(timings: Timings) -> str:
    """Render a row under `HEADER`."""
    measured = f"{timings.measured:,} {timings.unit}"
    measured = f"all {measured}" if timings.measured == timings.total else f"{measured} of {timings.total:,}"
    rate = f"{timings.measured / timings.seconds:,.0f} {timings.unit}"
    return f"| {timings.how} | {rate} | {_duration(timings.total_seconds)} | {measured} |"


def _duration(seconds: float) -> str:
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"
