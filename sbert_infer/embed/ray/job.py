"""The job on a Ray cluster: Ray Data reads, actors with an engine each embed, and a folder of Parquet files is written.

Ray's own checkpoints note the rows of each file before and after it is written, so the same command
goes on after the driver or the whole cluster has died; what dies with an actor or a node, Ray runs
again.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pd
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError, RayTaskError

from sbert_infer.embed.embedder import Embedder
from sbert_infer.embed.job import Job
from sbert_infer.embed.ray.source import ERROR, TEXT, CorpusDatasource
from sbert_infer.embed.read.columns import common_schema, conform
from sbert_infer.embed.read.parts import Position, cut_parts
from sbert_infer.embed.read.rows import ROW
from sbert_infer.embed.read.sources import Source, first_line, resolve
from sbert_infer.embed.write.journal import describe_changes
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.errors import EmbedError

__all__ = ["RayOptions", "embed_on_ray"]

_HIDDEN = "_sbert_infer"  # in the output folder; readers of Parquet folders pass over names with an underscore


@dataclass(frozen=True)
class RayOptions:
    """How to use the cluster."""

    address: str | None = None  # None: the running one, or else this machine
    cpus_per_actor: int = 1
    gpus_per_actor: float = 0
    max_actors: int | None = None  # as many as there is room for


def embed_on_ray(
    job: Job, output: str, options: RayOptions, *, restart: bool = False, force: bool = False, quiet: bool = False
) -> str:
    """Embed into the folder `output`, on storage that all nodes see. Returns a summary."""
    if job.vectors.precision in ("int8", "uint8"):
        raise EmbedError(f"--precision {job.vectors.precision} needs the ranges of the whole corpus: not with --ray")
    folder = _Folder(output)
    folder.begin(job.fingerprint(), restart=restart, force=force)
    _check_columns(job)
    ray.init(address=options.address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        with DataContext.current(_context(folder, quiet=quiet)):
            _pipeline(job, options).write_parquet(folder.path, filesystem=folder.filesystem, compression="zstd")
    except RayError as error:
        reason = first_line(error.cause if isinstance(error, RayTaskError) else error)
        raise EmbedError(
            f"on the cluster: {reason}; when that is mended, run the same command again to go on"
        ) from error
    return folder.finish()


def _check_columns(job: Job) -> None:
    """Raise before anything runs, if columns are missing or would be there twice."""
    first = next(cut_parts(job.sources[:1], job.columns, WINDOW_TEXTS, Position(), limit=1))
    own = {ERROR, TEXT, *([] if job.columns.id is None else [ROW])}
    if clash := sorted(own & set(first.carried().schema.names)):
        where = job.sources[0].path
        raise EmbedError(f"{where} has a column {clash[0]!r}, as one of the output's: see --columns, --id-column")


def _context(folder: _Folder, *, quiet: bool) -> DataContext:
    context = DataContext.get_current().copy()
    context.checkpoint_config = folder.checkpoint_config()
    context.enable_progress_bars = not quiet and sys.stderr.isatty()
    return context


def _pipeline(job: Job, options: RayOptions) -> ray.data.Dataset:
    job = replace(job, artifact=job.artifact.absolute(), sources=tuple(map(_absolute, job.sources)))
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
    """Actors have working folders of their own."""
    return source if "://" in source.path else replace(source, path=str(Path(source.path).absolute()))


class _RowEmbedder:
    """An actor: turns rows with a text into rows with a vector. A bad row keeps its error, and has none."""

    def __init__(self, job: Job, workers: int) -> None:
        options = {**asdict(job.vectors), "device": job.device, "workers": workers}
        self._embedder = Embedder(job.artifact, **options)
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
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), found.shape[1], mask=pa.array(~good))
        return rows.drop_columns([TEXT]).append_column(self._column, column)


class _Folder:
    """The output folder: Parquet files, and in a hidden folder what the job depends on and Ray's checkpoints."""

    def __init__(self, output: str) -> None:
        self.name = output
        self.filesystem, self.path = resolve(output)

    def begin(self, fingerprint: Mapping[str, Any], *, restart: bool, force: bool) -> None:
        """Make sure that what is there may be replaced, or belongs to the same job and can be gone on with."""
        note = f"{self.path}/{_HIDDEN}/job.json"
        there = self.filesystem.get_file_info(self.path).type != pafs.FileType.NotFound
        begun = self.filesystem.get_file_info(note).type != pafs.FileType.NotFound
        if there and (restart if begun else force):
            self._empty()
            begun = False
        elif begun:
            before = json.loads(self.filesystem.open_input_stream(note).read())
            if changes := describe_changes(before, fingerprint):
                raise EmbedError(f"{self.name} belongs to another job: {changes}; undo the change, or use --restart")
        elif there and self.filesystem.get_file_info(pafs.FileSelector(self.path)):
            raise EmbedError(f"{self.name} exists: choose another name, or replace it with --force")
        if not begun:
            self.filesystem.create_dir(f"{self.path}/{_HIDDEN}", recursive=True)
            with self.filesystem.open_output_stream(note) as file:
                file.write(json.dumps(fingerprint, indent=1).encode())

    def _empty(self) -> None:
        """Remove what a job writes; a folder with anything else in it is somebody's, and stays."""
        entries = self.filesystem.get_file_info(pafs.FileSelector(self.path))
        if others := [entry for entry in entries if entry.base_name != _HIDDEN and entry.extension != "parquet"]:
            raise EmbedError(
                f"{self.name} also holds {others[0].base_name}: choose another folder, or empty it yourself"
            )
        self.filesystem.delete_dir_contents(self.path)

    def checkpoint_config(self) -> Any:
        """Ray's checkpoints, by row number."""
        try:
            from ray.data.checkpoint import CheckpointConfig
        except ImportError as error:
            raise EmbedError(f"ray {ray.__version__} has no checkpoints: pip install 'sbert-infer[ray]'") from error
        path = f"{self.path}/{_HIDDEN}/checkpoint"
        return CheckpointConfig(ROW, path, override_filesystem=self.filesystem, delete_checkpoint_on_success=False)

    def _unify(self) -> None:
        """Blocks are read apart from each other: a field of JSON may be whole numbers in one, and text in another."""
        files = pd.dataset(self.path, filesystem=self.filesystem, format="parquet").files
        schemas = {path: pq.read_schema(path, filesystem=self.filesystem).remove_metadata() for path in files}
        common = common_schema(schemas.values())
        for path in [path for path, schema in schemas.items() if not schema.equals(common)]:
            table = conform(pq.read_table(path, filesystem=self.filesystem, partitioning=None), common)
            fresh = f"{self.path}/{_HIDDEN}/unified.parquet"
            pq.write_table(table, fresh, filesystem=self.filesystem, compression="zstd")
            self.filesystem.move(fresh, path)

    def finish(self) -> str:
        """Give all files the same columns, count what is there, and remove what was only needed to go on."""
        self._unify()
        files = pd.dataset(self.path, filesystem=self.filesystem, format="parquet")
        rows, bad = files.count_rows(), files.count_rows(filter=pd.field(ERROR).is_valid()) if files.files else 0
        self.filesystem.delete_dir(f"{self.path}/{_HIDDEN}")
        lines = [f"{self.name}  {rows - bad:,} vectors in {len(files.files):,} files"]
        if bad:
            lines.append(f"  no vector  {bad:,} rows without a readable text: see column {ERROR!r}")
        return "\n".join(lines)
