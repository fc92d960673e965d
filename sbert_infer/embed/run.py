"""The job itself: one thread reads ahead, the engine's workers run the model, another thread writes what is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from sbert_infer._util.threads import in_daemon_thread
from sbert_infer.embed.job import Job
from sbert_infer.embed.progress import Progress
from sbert_infer.embed.read.parts import Part, cut_parts
from sbert_infer.embed.write.journal import Journal, PartStats
from sbert_infer.embed.write.output import at_once
from sbert_infer.encode.output import Window
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.engine import Engine
from sbert_infer.errors import EmbedError

__all__ = ["embed_parts"]

Item = TypeVar("Item")

_THREAD = "sbert-embed"  # one that reads may be waiting for standard input


def embed_parts(job: Job, journal: Journal, engine: Engine, progress: Progress, *, stop_at_bad_row: bool) -> None:
    """Embed what the journal lacks. Five parts are in memory at most: read, waiting, running (two) and written."""
    vectors = job.vectors
    parts = cut_parts(job.sources, job.columns, job.part_texts, journal.position, job.limit)
    filling = _Filling(job, journal, min(vectors.truncate_dim or engine.get_embedding_dimension(), engine.manifest.dim))
    failures: list[Exception] = []

    def texts() -> Iterator[str]:
        """All that can be read. Parts before a failure are still embedded."""
        try:
            for part in _ahead(parts):
                if part.bad and stop_at_bad_row:
                    raise EmbedError(_first_bad(part))
                filling.expect(part)
                progress.part(len(part.texts), part.end.fraction)
                yield from part.texts
        except Exception as failure:
            failures.append(failure)

    windows = engine.encode_windows(
        texts(),
        vectors.prompt_name,
        vectors.prompt,
        normalize_embeddings=vectors.normalize,
        truncate_dim=vectors.truncate_dim,
        progress=progress.add,
    )
    try:
        for window in windows:
            progress.tokens += window.stats.tokens
            filling.add(window)
        filling.finish()
    finally:
        filling.wait()
    if failures:
        raise failures[0]


def _ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, the next one being made in a thread while this one is used."""
    following = in_daemon_thread(_THREAD, lambda: next(items, None))
    while (item := following.result()) is not None:
        following = in_daemon_thread(_THREAD, lambda: next(items, None))
        yield item


@dataclass
class _Growing:
    """A part whose vectors are coming in."""

    part: Part
    vectors: list[npt.NDArray[np.float32]] = field(default_factory=list)
    stats: PartStats = field(default_factory=PartStats)


class _Filling:
    """Puts vectors, as they come, into the parts that wait for them, and has full ones written."""

    def __init__(self, job: Job, journal: Journal, dim: int) -> None:
        self._job, self._journal, self._dim = job, journal, dim
        self._waiting: deque[_Growing] = deque()
        self._writing: Future[None] | None = None

    def expect(self, part: Part) -> None:
        self._waiting.append(_Growing(part, stats=PartStats(bad=sum(bad.problem.rows for bad in part.bad))))

    def add(self, window: Window) -> None:
        """A window never crosses the end of a part, since all but the last hold whole windows."""
        while not self._waiting[0].part.texts:
            self._write(self._waiting.popleft())
        growing = self._waiting[0]
        growing.vectors.append(window.vectors)
        growing.stats += PartStats(window.stats.texts, window.stats.tokens, window.stats.truncated)
        if growing.stats.texts == len(growing.part.texts):
            self._write(self._waiting.popleft())

    def finish(self) -> None:
        """Write parts that have no texts at the end."""
        while self._waiting:
            self._write(self._waiting.popleft())
        self.wait()

    def wait(self) -> None:
        """Until everything handed over is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, growing: _Growing) -> None:
        self.wait()
        self._writing = in_daemon_thread(_THREAD, lambda: self._store(growing))

    def _store(self, growing: _Growing) -> None:
        empty = np.empty((0, self._dim), np.float32)
        vectors: npt.NDArray[Any] = np.concatenate(growing.vectors) if growing.vectors else empty
        vectors = reduce_precision(vectors, at_once(self._job.vectors.precision))
        self._journal.append(growing.part, self._job.columns.embedding, vectors, growing.stats)


def _first_bad(part: Part) -> str:
    bad = part.bad[0]
    place = f"line {bad.line}" if bad.line is not None else f"row {bad.row}"
    return f"{bad.file}, {place}: {bad.problem.reason}; without --on-error fail it would be set aside"
