"""`sbert-embed` on this machine: check everything, embed what is missing, write the output.

One thread reads ahead, the engine's workers run the model, another thread writes finished parts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sbert_infer._util.threads import in_daemon_thread
from sbert_infer.embed.embedder import open_engine
from sbert_infer.embed.job import Job
from sbert_infer.embed.progress import Progress
from sbert_infer.embed.read.parts import Part, cut_parts
from sbert_infer.embed.reuse import KnownVectors
from sbert_infer.embed.write.journal import Journal, PartStats, open_journal
from sbert_infer.embed.write.output import OutputFile, at_once, write_bad_rows, write_output
from sbert_infer.encode.output import Window
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.encode.precision import reduce_precision
from sbert_infer.engine import Engine
from sbert_infer.errors import EmbedError, TextError

Item = TypeVar("Item")
Array = npt.NDArray[np.float32]

_THREAD = "sbert-embed"  # name of the threads that read and write
# A part is written after this long even if it is not full, so that a slow machine loses little.
_SAVE_S = 15.0


def embed(
    job: Job,
    target: OutputFile,
    *,
    workers: int | None = None,
    stop_at_bad_row: bool = False,
    restart: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> str:
    """Do the job, or what is left of it, and return a summary."""
    target.path.parent.mkdir(parents=True, exist_ok=True)
    with open_journal(target.parts_folder, job.fingerprint(), restart=restart) as journal:
        _check_output(target, job, force=force or journal.is_finishing)
        before = journal.stats.texts
        with closing(Progress(journal.position.fraction, quiet=quiet)) as progress:
            if not journal.is_complete:
                options = {"device": job.device, "workers": workers, "verify": job.verify, "compute": job.compute}
                with open_engine(job.model, **options) as engine:
                    if engine.artifact.sha256 != job.artifact.sha256:
                        why = "what sbert-tune chose does not run, and the default has other vectors"
                        raise EmbedError(f"{job.model.path}: {why}: run it again, or leave out --compute")
                    _embed_parts(job, journal, engine, progress, stop_at_bad_row=stop_at_bad_row)
        journal.mark_finishing()
        write_bad_rows(target, journal.parts)
        write_output(target, journal.parts, job.origin, job.part_texts)
        summary = _summary(target, journal, progress, before)
        journal.remove()
    return summary


def _check_output(target: OutputFile, job: Job, *, force: bool) -> None:
    if target.path.is_dir():
        raise EmbedError(f"{target.path} is a folder: name a file")
    if any(target.path.resolve() == Path(source.path).resolve() for source in job.sources):
        raise EmbedError(f"{target.path} is also an input: choose another name")
    if any(target.path.resolve() == output.path.resolve() for output in job.earlier_outputs):
        raise EmbedError(f"{target.path} is also an output to --reuse: choose another name")
    if target.path.exists() and not force:
        raise EmbedError(f"{target.path} exists: choose another name, or replace it with --force")


def _embed_parts(job: Job, journal: Journal, engine: Engine, progress: Progress, *, stop_at_bad_row: bool) -> None:
    """Embed what the journal lacks.

    Texts are read window by window. At most two parts are in memory: one growing, one being
    written.
    """
    parts = cut_parts(job.sources, job.columns, WINDOW_TEXTS, journal.position, job.limit)
    writer = _PartWriter(job, journal, job.vectors.dim(engine))
    failures: list[Exception] = []

    def expected() -> Iterator[Part]:
        """Yield all parts that can be read. Those before a failure are still embedded."""
        try:
            for part in _ahead(parts):
                if part.bad and stop_at_bad_row:
                    raise EmbedError(_first_bad(part))
                writer.expect(part)
                progress.part(len(part.texts), part.end.fraction)
                yield part
        except Exception as failure:
            failures.append(failure)

    try:
        for vectors, stats in _vectors(job, engine, expected(), journal.folder, progress):
            progress.tokens += stats.tokens
            writer.add(vectors, stats)
    except TextError as error:
        raise EmbedError(f"{writer.place_of(error.index)}: the model gives NaN or infinity for this text") from error
    finally:
        writer.finish()
    if failures:
        raise failures[0]


def _vectors(
    job: Job, engine: Engine, parts: Iterator[Part], folder: Path, progress: Progress
) -> Iterator[tuple[Array, PartStats]]:
    """Yield the vectors of the parts' texts, in order; never those of two parts together.

    With vectors to use again, the other texts of a part run together, and with those of no other
    part: a resumed run then batches like an uninterrupted one.
    """
    if not job.earlier_outputs:
        for window in job.vectors.windows(engine, (text for part in parts for text in part.texts), progress.add):
            yield window.vectors, _stats(window)
        return
    known = KnownVectors.build(folder, job.earlier_outputs, job.origin.dim)
    for texts in (part.texts for part in parts if part.texts):
        missing, vectors = known.find(texts)
        reused = len(texts) - len(missing)
        progress.skip(reused)
        stats = PartStats(reused, reused=reused)
        try:
            for window in job.vectors.windows(engine, [texts[index] for index in missing], progress.add):
                vectors[missing[window.start : window.start + len(window.vectors)]] = window.vectors
                stats += _stats(window)
        except TextError as error:  # names the text by its place among the missing ones
            raise TextError(str(error), int(missing[error.index]), not_finite=error.not_finite) from error
        yield vectors, stats


def _stats(window: Window) -> PartStats:
    return PartStats(window.stats.texts, window.stats.tokens, window.stats.truncated)


def _ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items, each made in a thread while the one before is used."""
    following = in_daemon_thread(_THREAD, lambda: next(items, None))
    while (item := following.result()) is not None:
        following = in_daemon_thread(_THREAD, lambda: next(items, None))
        yield item


@dataclass
class _Growing:
    """A part, and its vectors so far."""

    part: Part
    vectors: list[Array] = field(default_factory=list)
    stats: PartStats = field(default_factory=PartStats)

    def extend(self, following: _Growing) -> None:
        self.part.extend(following.part)
        self.vectors += following.vectors
        self.stats += following.stats


class _PartWriter:
    """Adds vectors to the windows that wait for them, and has parts of several windows written."""

    def __init__(self, job: Job, journal: Journal, dim: int) -> None:
        self._job, self._journal, self._dim = job, journal, dim
        self._waiting: deque[_Growing] = deque()
        self._unsaved: _Growing | None = None
        self._saved_at = time.monotonic()
        self._writing: Future[None] | None = None

    def expect(self, part: Part) -> None:
        """Take a part of one window, or one that only has bad rows."""
        self._waiting.append(_Growing(part, stats=PartStats(bad=sum(bad.problem.rows for bad in part.bad))))

    def add(self, vectors: Array, stats: PartStats) -> None:
        """Add the vectors of the first window that waits."""
        while not self._waiting[0].part.texts:
            self._complete(self._waiting.popleft())
        growing = self._waiting[0]
        growing.vectors.append(vectors)
        growing.stats += stats
        if growing.stats.texts == len(growing.part.texts):
            self._complete(self._waiting.popleft())

    def place_of(self, index: int) -> str:
        """Name the row of a text in the first window that waits, given its place in this run."""
        part = next(growing.part for growing in self._waiting if growing.part.texts)
        row, rows = index % WINDOW_TEXTS, part.carried()
        return f"{rows.column_names[0]} {rows.column(0)[row].as_py()}, {part.texts[row]!r:.60}"

    def finish(self) -> None:
        """Write all that is complete, and wait until it is on disk."""
        while self._waiting and not self._waiting[0].part.texts:  # at the end, or before a failure
            self._complete(self._waiting.popleft())
        if self._unsaved is not None:
            self._save(self._unsaved)
        self._wait()

    def _complete(self, growing: _Growing) -> None:
        if self._unsaved is None:
            self._unsaved = growing
        else:
            self._unsaved.extend(growing)
        is_late = time.monotonic() - self._saved_at >= _SAVE_S
        if is_late or self._unsaved.part.is_full(self._job.part_texts):
            self._save(self._unsaved)

    def _save(self, growing: _Growing) -> None:
        self._wait()
        self._unsaved, self._saved_at = None, time.monotonic()
        self._writing = in_daemon_thread(_THREAD, lambda: self._store(growing))

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except BaseException:  # parts have no gaps: after one that failed, none may follow
                self._unsaved = None
                self._waiting.clear()
                raise

    def _store(self, growing: _Growing) -> None:
        vectors = np.concatenate([np.empty((0, self._dim), np.float32), *growing.vectors])
        vectors = reduce_precision(vectors, at_once(self._job.vectors.precision))
        self._journal.append(growing.part, self._job.columns.embedding, vectors, growing.stats)


def _first_bad(part: Part) -> str:
    bad = part.bad[0]
    place = f"line {bad.line}" if bad.line is not None else f"row {bad.row}"
    return f"{bad.file}, {place}: {bad.problem.reason}; without --on-error fail it would be set aside"


def _summary(target: OutputFile, journal: Journal, progress: Progress, before: int) -> str:
    stats, seconds = journal.stats, max(progress.seconds, 1e-9)
    size = target.path.stat().st_size
    speed = f"{progress.texts / seconds:,.0f} texts/s, {progress.tokens / seconds:,.0f} tokens/s"
    lines = [
        f"{target.path}  {stats.texts:,} vectors, {size / 1e6:,.1f} MB",
        f"  embedded   {progress.texts:,} texts, {progress.tokens:,} tokens, {seconds:.1f} s, {speed}",
    ]
    if stats.reused:
        lines.append(f"  reused     {stats.reused:,} texts have the vectors of earlier outputs")
    if before:
        lines.append(f"  resumed    {before:,} texts were done before")
    if stats.truncated:
        lines.append(f"  truncated  {stats.truncated:,} texts were longer than the model's limit")
    if stats.bad:
        lines.append(f"  set aside  {stats.bad:,} rows without a readable text: see {target.bad_rows}")
    if target.format == "npy":
        lines.append(f"  rows       ids and columns, in the same order: {target.rows}")
    return "\n".join(lines)
