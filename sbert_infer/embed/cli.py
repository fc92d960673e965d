"""The command `sbert-embed`."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import Any

import click

from sbert_infer import __version__
from sbert_infer.embed.embedder import Vectors
from sbert_infer.encode.precision import PRECISIONS
from sbert_infer.errors import EmbedError, SbertInferError

EXAMPLES = """\b
Examples:
  sbert-embed corpus.txt model.onnx -o vectors.parquet      a text on each line
  sbert-embed corpus.parquet model.onnx -o vectors.parquet --text-column body --id-column doc_id
  sbert-embed 'shards/*.jsonl.gz' model.int8.onnx -o vectors.npy --columns ''
  zcat dump.gz | sbert-embed - model.onnx -o vectors.jsonl --input-format jsonl
  sbert-embed corpus.tsv model.onnx -o bits.parquet --no-header --text-column 2 --precision ubinary

The output appears when it is complete. Until then it grows in OUTPUT.parts: after a crash, a full disk or Ctrl-C
the same command goes on where it was. Rows without a readable text are listed in OUTPUT.errors.jsonl, and the
exit code is still 0; see --on-error. It is 1 after an error, 2 for a wrong option, and 130 after Ctrl-C.
"""

_NAMES = click.Choice(["text", "jsonl", "csv", "tsv", "parquet"])


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("artifact", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", required=True, help="File to write; with --ray, a folder.")
@click.option("--format", type=click.Choice(["parquet", "npy", "jsonl"]), help="Of the output. [by its name]")
@click.option("--input-format", type=_NAMES, help="Of the input. [by its name; text for standard input]")
@click.option("--text-column", default="text", show_default=True, metavar="NAME", help="Column that holds the texts.")
@click.option("--id-column", metavar="NAME", help="Column that identifies a row. [rows are numbered, column `row`]")
@click.option("--columns", metavar="A,B", help="Columns to carry along, '' for none. [all but the text]")
@click.option("--embedding-column", default="embedding", show_default=True, metavar="NAME", help="Column to write.")
@click.option("--header/--no-header", default=True, help="Whether CSV and TSV begin with names. [header; else 1,2,3..]")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Read only the first N rows.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="float32", show_default=True, help="Of the numbers."
)
@click.option("--truncate-dim", type=click.IntRange(min=1), metavar="N", help="Keep the first N numbers of a vector.")
@click.option("--normalize", is_flag=True, help="Scale vectors to length 1.")
@click.option("--prompt-name", metavar="NAME", help="Which of the model's prompts to put before each text.")
@click.option("--prompt", metavar="TEXT", help="A prompt to put before each text.")
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1. [the best there is]")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Batches at once on a CPU. [usable cores]")
@click.option(
    "--on-error", type=click.Choice(["skip", "fail"]), default="skip", show_default=True, help="For bad rows."
)
@click.option(
    "--part-rows", type=click.IntRange(min=1), metavar="N", help="Texts in a part, a multiple of 4096. [16384]"
)
@click.option(
    "--compression",
    type=click.Choice(["zstd", "snappy", "none"]),
    help="Of Parquet's other columns; vectors do not compress. [zstd]",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    help="Run on a Ray cluster; OUTPUT is a folder on storage that all nodes see. [the running one, else this machine]",
)
@click.option("--ray-cpus", type=click.IntRange(min=1), metavar="N", help="Cores of an actor. [1]")
@click.option("--ray-gpus", type=click.FloatRange(min=0), metavar="N", help="GPUs of an actor. [0]")
@click.option("--ray-actors", type=click.IntRange(min=1), metavar="N", help="At most N actors. [all there is room for]")
@click.option("--restart", is_flag=True, help="Forget what an earlier run has done.")
@click.option("--force", is_flag=True, help="Replace an existing OUTPUT.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors and warnings only.")
@click.version_option(__version__)
def main(inputs: tuple[str, ...], artifact: Path, output: str, **options: Any) -> None:
    """Embed every text of INPUT... with ARTIFACT.

    INPUT is a file, a glob, a folder, or - for standard input.
    """
    try:
        summary = _embed(inputs, artifact, output, **options)
    except SbertInferError as error:
        raise SystemExit(_error(str(error))) from None
    except OSError as error:
        raise SystemExit(_error(_os_message(error, output))) from None
    except KeyboardInterrupt:
        click.echo("\ninterrupted: run the same command again to go on", err=True)
        raise SystemExit(130) from None
    if not options["quiet"]:
        click.echo(summary)


def _embed(
    inputs: tuple[str, ...],
    artifact: Path,
    output: str,
    *,
    precision: str,
    normalize: bool,
    truncate_dim: int | None,
    prompt_name: str | None,
    prompt: str | None,
    format: str | None,
    compression: str | None,
    workers: int | None,
    on_error: str,
    restart: bool,
    force: bool,
    quiet: bool,
    ray: str | None,
    ray_cpus: int | None,
    ray_gpus: float | None,
    ray_actors: int | None,
    **job_options: Any,
) -> str:
    given: dict[str, object] = {"--ray-cpus": ray_cpus, "--ray-gpus": ray_gpus, "--ray-actors": ray_actors}
    if ray is not None:
        given = {"--format": format, "--workers": workers, "--limit": job_options["limit"]}
        given |= {
            "--compression": compression,
            "--on-error fail": on_error == "fail" or None,
            "standard input": "-" in inputs or None,
        }
    if wrong := [name for name, value in given.items() if value is not None]:
        raise EmbedError(f"{', '.join(wrong)} can't be used {'with' if ray else 'without'} --ray")
    if ray is not None and ray not in ("auto", "local") and ":" not in ray:
        raise EmbedError(f"{ray!r} is no address of a Ray cluster: give HOST:PORT, or --ray=auto before other words")
    vectors = Vectors(precision, normalize, truncate_dim, prompt_name, prompt)
    job = _import("job").make_job(inputs, artifact, vectors=vectors, **job_options)
    if ray is not None:
        on_ray = _import("ray.job")
        options = on_ray.RayOptions(None if ray == "auto" else ray, ray_cpus or 1, ray_gpus or 0, ray_actors)
        return str(on_ray.embed_on_ray(job, output, options, restart=restart, force=force, quiet=quiet))
    target = _import("write.output").make_output(Path(output), format, compression)
    flags = {"restart": restart, "force": force, "quiet": quiet}
    return str(_import("local").embed(job, target, workers=workers, stop_at_bad_row=on_error == "fail", **flags))


def _import(module: str) -> Any:
    """Import a module of this package late, since pyarrow and ray may be missing."""
    try:
        return importlib.import_module(f"sbert_infer.embed.{module}")
    except ImportError as error:
        name = (error.name or "").split(".")[0]
        if name not in ("pyarrow", "ray"):
            raise
        extra = "ray" if name == "ray" else "embed"
        raise EmbedError(
            f"{name} is not installed, sbert-embed needs it: pip install 'sbert-infer[{extra}]'"
        ) from error


def _os_message(error: OSError, output: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        folder = Path(output).absolute().parent
        return f"no space left for {output}: make room in {folder}, then run the same command again to go on"
    return f"{error.filename or output}: {error.strerror or error}"


def _error(message: str) -> int:
    click.echo(f"error: {message}", err=True)
    return 1


if __name__ == "__main__":
    main()
