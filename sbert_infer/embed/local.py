"""What `sbert-embed` does: check everything, embed what is missing, write the output, say what was done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sbert_infer.embed.embedder import DenseEngine
from sbert_infer.embed.job import PART_TEXTS, Job, Vectors
from sbert_infer.embed.progress import Progress
from sbert_infer.embed.read.rows import Columns
from sbert_infer.embed.read.sources import find_sources
from sbert_infer.embed.run import embed_parts
from sbert_infer.embed.write.journal import Journal, open_journal
from sbert_infer.embed.write.output import OUTPUT_FORMATS, Output, write_bad_rows, write_output
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.errors import EmbedError

__all__ = ["embed", "make_job", "make_output"]


def make_job(
    inputs: Sequence[str],
    artifact: Path,
    *,
    input_format: str | None,
    text_column: str,
    id_column: str | None,
    columns: str | None,
    embedding_column: str,
    header: bool,
    limit: int | None,
    part_rows: int | None,
    device: str | None,
    vectors: Vectors,
) -> Job:
    """The job that the options of `sbert-embed` describe."""
    carried = None if columns is None else tuple(name.strip() for name in columns.split(",") if name.strip())
    return Job(
        sources=tuple(find_sources(inputs, input_format)),
        artifact=artifact,
        columns=Columns(text_column, id_column, carried, embedding_column, header),
        vectors=vectors,
        device=device,
        part_texts=_part_texts(part_rows),
        limit=limit,
    )


def make_output(path: Path, format: str | None, compression: str | None) -> Output:
    """The file to write."""
    found = format or OUTPUT_FORMATS.get(path.suffix.lower())
    if found is None:
        raise EmbedError(
            f"{path}: its name does not say what to write: end it in .parquet, .npy or .jsonl, or see --format"
        )
    if found == "jsonl" and compression is not None:
        raise EmbedError("--compression is for Parquet: leave it out, and compress the JSONL afterwards")
    return Output(path, found, compression or Output.compression)


def embed(
    job: Job,
    target: Output,
    *,
    workers: int | None = None,
    stop_at_bad_row: bool = False,
    restart: bool = False,
    force: bool = False,
    quiet: bool = False,
) -> str:
    """Do the job, or what is left of it. Returns a summary."""
    with open_journal(target.parts_folder, job.fingerprint(), restart=restart) as journal:
        _check_output(target, job, force=force or journal.is_finishing)
        before = journal.stats.texts
        with Progress(journal.position.fraction, quiet=quiet) as progress:
            if not journal.is_complete:
                with DenseEngine(job.artifact, device=job.device, workers=workers, on_truncate="ignore") as engine:
                    embed_parts(job, journal, engine, progress, stop_at_bad_row=stop_at_bad_row)
        journal.mark_finishing()
        write_bad_rows(target, journal.parts)
        write_output(target, journal.parts, job.columns.embedding, job.vectors.precision)
        summary = _summary(target, journal, progress, before)
        journal.remove()
    return summary


def _part_texts(part_rows: int | None) -> int:
    if part_rows is not None and part_rows % WINDOW_TEXTS:
        # Texts are sorted by length in windows, and a part that ends within one would change what
        # runs together.
        raise EmbedError(f"--part-rows must be a multiple of {WINDOW_TEXTS}, got {part_rows}")
    return part_rows or PART_TEXTS


def _check_output(target: Output, job: Job, *, force: bool) -> None:
    if target.path.is_dir():
        raise EmbedError(f"{target.path} is a folder: name a file")
    if any(target.path.resolve() == Path(source.path).resolve() for source in job.sources):
        raise EmbedError(f"{target.path} is also an input: choose another name")
    if target.path.exists() and not force:
        raise EmbedError(f"{target.path} exists: choose another name, or replace it with --force")


def _summary(target: Output, journal: Journal, progress: Progress, before: int) -> str:
    stats, seconds = journal.stats, max(progress.seconds, 1e-9)
    size = target.path.stat().st_size
    speed = f"{progress.texts / seconds:,.0f} texts/s, {progress.tokens / seconds:,.0f} tokens/s"
    lines = [
        f"{target.path}  {stats.texts:,} vectors, {size / 1e6:,.1f} MB",
        f"  embedded   {progress.texts:,} texts, {progress.tokens:,} tokens, {seconds:.1f} s, {speed}",
    ]
    if before:
        lines.append(f"  resumed    {before:,} texts were done before")
    if stats.truncated:
        lines.append(f"  truncated  {stats.truncated:,} texts were longer than the model's limit")
    if stats.bad:
        lines.append(f"  set aside  {stats.bad:,} rows without a readable text: see {target.bad_rows}")
    if target.format == "npy":
        lines.append(f"  rows       ids and columns, in the same order: {target.rows}")
    return "\n".join(lines)
