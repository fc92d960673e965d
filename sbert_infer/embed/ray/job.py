"""A job on a Ray cluster: Ray Data reads and writes, and actors with an engine each embed.

Ray's own checkpoints note the rows of each file before and after it is written, so the same command
resumes after the driver or the whole cluster has died. What an actor or a node was doing when it
died, Ray runs again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError, RayTaskError

from sbert_infer._util.cores import usable_cores
from sbert_infer.embed.embedder import Embedder
from sbert_infer.embed.job import Job
from sbert_infer.embed.progress import LINE_S
from sbert_infer.embed.ray.output import OutputFolder
from sbert_infer.embed.ray.source import ERROR, TEXT, CorpusDatasource
from sbert_infer.embed.read.parts import Position, cut_parts
from sbert_infer.embed.read.rows import ROW
from sbert_infer.embed.read.sources import Source, first_line
from sbert_infer.embed.write.vectors import fixed_lists
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.errors import EmbedError, warn


@dataclass(frozen=True)
class RayOptions:
    """How to use the cluster."""

    address: str | None = None  # None: the running one, or else this machine
    cpus_per_actor: int = 1
    gpus_per_actor: float = 0
    max_actors: int | None = None  # None: as many as there is room for

    @property
    def needed_cpus(self) -> int:
        """Cores without which a job would wait for ever.

        They are for an actor that embeds, a task that reads or writes, and when a job resumes, the
        actor of Ray that drops rows which are already written.
        """
        return self.cpus_per_actor + 2


def embed_on_ray(
    job: Job, output: str, options: RayOptions, *, restart: bool = False, force: bool = False, quiet: bool = False
) -> str:
    """Embed into the folder `output`, on storage that all nodes see, and return a summary."""
    if job.vectors.precision in ("int8", "uint8"):
        raise EmbedError(f"--precision {job.vectors.precision} needs the ranges of the whole corpus: not with --ray")
    folder = OutputFolder(output)
    folder.begin(job.fingerprint(), restart=restart, force=force)
    _check_columns(job)
    _connect(options)
    try:
        lines = nullcontext() if quiet or sys.stderr.isatty() else printed_lines(folder)
        with lines, DataContext.current(_context(folder, quiet=quiet)):
            _pipeline(job, options).write_parquet(folder.path, filesystem=folder.filesystem, compression="zstd")
    except RayError as error:
        reason = first_line(error.cause if isinstance(error, RayTaskError) else error)
        raise EmbedError(
            f"on the cluster: {reason}; once that is fixed, run the same command again to go on"
        ) from error
    return folder.finish(job.origin)


@contextmanager
def printed_lines(folder: OutputFolder) -> Iterator[None]:
    """Print a line now and then, as a job on one machine does where there is no terminal."""
    start, done = time.monotonic(), threading.Event()

    def run() -> None:
        before = folder.count_rows()
        while not done.wait(LINE_S):
            rows, seconds = folder.count_rows(), time.monotonic() - start
            speed = f"{(rows - before) / seconds:,.0f} rows/s"
            print(f"{rows:,} rows written, {speed}, {seconds:,.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, name="sbert-embed progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _connect(options: RayOptions) -> None:
    """Connect to the cluster, or start one on this machine that has the cores a job needs.

    There may then be more cores than the machine has: only those of the actors are busy all the
    time.
    """
    quiet = {"ignore_reinit_error": True, "log_to_driver": False, "logging_level": logging.WARNING}
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    address, needed = options.address, options.needed_cpus
    if address is None:
        try:
            ray.init("auto", **quiet)
        except ConnectionError:  # none is running
            address = "local"
    if address is not None:
        here = {"num_cpus": max(usable_cores(), needed)} if address == "local" else {}
        ray.init(address, **here, **quiet)
    cpus = ray.cluster_resources().get("CPU", 0)
    if cpus < needed:
        warn(f"the Ray cluster has {cpus:g} CPUs, and this job needs {needed}: it waits until there are more")


def _check_columns(job: Job) -> None:
    """Raise, before anything runs, if columns are missing or would be there twice."""
    first = next(cut_parts(job.sources[:1], job.columns, WINDOW_TEXTS, Position(), limit=1))
    own = {ERROR, TEXT, *([] if job.columns.id is None else [ROW])}
    if clash := sorted(own & set(first.carried().schema.names)):
        where = job.sources[0].path
        raise EmbedError(f"{where} has a column {clash[0]!r}, as one of the output's: see --columns, --id-column")


def _context(folder: OutputFolder, *, quiet: bool) -> DataContext:
    context = DataContext.get_current().copy()
    context.checkpoint_config = folder.checkpoint_config()
    context.enable_progress_bars = not quiet and sys.stderr.isatty()
    return context


def _pipeline(job: Job, options: RayOptions) -> ray.data.Dataset:
    model = replace(job.model, path=job.model.path.absolute())
    job = replace(job, model=model, sources=tuple(map(_absolute, job.sources)))
    source = CorpusDatasource(job.sources, job.columns, job.part_texts)
    rows = ray.data.read_datasource(source, override_num_blocks=len(source))
    return rows.map_batches(
        _RowEmbedder,
        fn_constructor_args=(job, options.cpus_per_actor),
        batch_size=None,  # as it was read: blocks of many rows, always the same
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(min_size=1, max_size=options.max_actors),
        num_cpus=options.cpus_per_actor,
        num_gpus=options.gpus_per_actor or None,
    )


def _absolute(source: Source) -> Source:
    """Make the path absolute, since actors have working folders of their own."""
    return source if "://" in source.path else replace(source, path=str(Path(source.path).absolute()))


class _RowEmbedder:
    """An actor: replaces texts by vectors. A bad row has an error instead."""

    def __init__(self, job: Job, workers: int) -> None:
        options = {**asdict(job.vectors), "device": job.device, "workers": workers, "verify": job.verify}
        self._embedder = Embedder(job.model.path, **options)
        self._column, self._piece_rows = job.columns.embedding, job.part_texts

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for start in range(0, len(batch), self._piece_rows):
            yield self._embed(batch.slice(start, self._piece_rows))

    def _embed(self, rows: pa.Table) -> pa.Table:
        texts = rows[TEXT].to_pylist()
        good = np.array([text is not None for text in texts])
        found = self._embedder.encode([text for text in texts if text is not None])
        vectors = np.zeros((len(texts), found.shape[1]), found.dtype)
        vectors[good] = found
        return rows.drop_columns([TEXT]).append_column(self._column, fixed_lists(vectors, ~good))
