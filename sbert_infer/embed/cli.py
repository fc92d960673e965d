"""The command `sbert-embed`."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from typing import Any, get_args

import click

from sbert_infer import __version__
from sbert_infer.artifact.exports import MODEL_PRECISIONS
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.encode.precision import PRECISIONS
from sbert_infer.encode.self_check import Verify
from sbert_infer.errors import EmbedError, SbertInferError
from sbert_infer.opening import Compute

EXAMPLES = """\b
Examples:
  sbert-embed corpus.txt model.onnx -o vectors.parquet      a text on each line
  sbert-embed corpus.parquet model.onnx -o by_id.parquet --text-column body --id-column doc_id
  sbert-embed 'shards/*.jsonl.gz' model.int8.onnx -o shards.npy --columns ''
  sbert-embed corpus.txt sentence-transformers/all-MiniLM-L6-v2 -o minilm.npy
  zcat dump.gz | sbert-embed - model.onnx -o dump.jsonl --input-format jsonl
  sbert-embed old.parquet model.onnx -o old_vectors.parquet --columns text
  sbert-embed new.parquet model.onnx -o new_vectors.parquet --columns text --reuse old_vectors.parquet
  sbert-embed corpus.tsv model.onnx -o bits.parquet --no-header --text-column 2 --precision ubinary

The output appears when it is complete. Until then it grows in OUTPUT.parts: after a crash, a full disk or Ctrl-C
the same command goes on where it was. Rows without a readable text are listed in OUTPUT.errors.jsonl, and the
exit code is still 0; see --on-error. It is 1 after an error, 2 for a wrong option, and 130 after Ctrl-C.
"""

_COUNT = click.IntRange(min=1)


def _whole_windows(context: click.Context, option: click.Parameter, rows: int) -> int:
    """Refuse parts that end within a window of texts that are sorted by length together."""
    if rows % WINDOW_TEXTS:
        raise click.BadParameter(f"must be a multiple of {WINDOW_TEXTS}, got {rows}")
    return rows


_NAMES = click.Choice(["text", "jsonl", "csv", "tsv", "parquet"])


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("model")
@click.option("-o", "--output", required=True, help="File to write; with --ray, a folder.")
@click.option("--format", type=click.Choice(["parquet", "npy", "jsonl"]), help="Of the output. [by its name]")
@click.option("--input-format", type=_NAMES, help="Of the input. [by its name; text for standard input]")
@click.option("--text-column", default="text", show_default=True, metavar="NAME", help="Column that holds the texts.")
@click.option("--id-column", metavar="NAME", help="Column that identifies a row. [rows are numbered, column `row`]")
@click.option("--columns", metavar="A,B", help="Columns to carry along, '' for none. [all but the text]")
@click.option("--embedding-column", default="embedding", show_default=True, metavar="NAME", help="Column to write.")
@click.option("--header/--no-header", default=True, help="Whether CSV and TSV begin with names. [header; else 1,2,3..]")
@click.option("--limit", type=_COUNT, metavar="N", help="Read only the first N rows.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), default="float32", show_default=True, help="Of the numbers."
)
@click.option("--truncate-dim", type=_COUNT, metavar="N", help="Keep the first N numbers of a vector.")
@click.option("--normalize", is_flag=True, help="Scale vectors to length 1.")
@click.option("--prompt-name", metavar="NAME", help="Which of the model's prompts to put before each text.")
@click.option("--prompt", metavar="TEXT", help="A prompt to put before each text.")
@click.option(
    "--reuse", multiple=True, metavar="PATH", help="Earlier output, or a folder of some, whose vectors to use again."
)
@click.option(
    "--model-precision", type=click.Choice(MODEL_PRECISIONS), help="To which precision to export a checkpoint. [fp32]"
)
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1. [the best there is]")
@click.option("--workers", type=_COUNT, metavar="N", help="Batches at once on a CPU. [usable cores]")
@click.option(
    "--verify",
    type=click.Choice(get_args(Verify)),
    default="once",
    show_default=True,
    help="Compare vectors of this machine with the eager model's, which MODEL holds for some texts.",
)
@click.option(
    "--compute",
    type=click.Choice(get_args(Compute)),
    help="auto: what sbert-tune has chosen for the model on this machine. [as the file is]",
)
@click.option(
    "--on-error", type=click.Choice(["skip", "fail"]), default="skip", show_default=True, help="For bad rows."
)
@click.option(
    "--part-rows",
    type=_COUNT,
    callback=_whole_windows,
    default=4 * WINDOW_TEXTS,
    show_default=True,
    metavar="N",
    help="Most texts in a part, and texts in a row group; a multiple of 4096.",
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
@click.option("--ray-cpus", type=_COUNT, metavar="N", help="Cores of an actor. [1]")
@click.option("--ray-gpus", type=click.FloatRange(min=0), metavar="N", help="GPUs of an actor. [0]")
@click.option("--ray-actors", type=_COUNT, metavar="N", help="At most N actors. [all there is room for]")
@click.option("--restart", is_flag=True, help="Forget what an earlier run has done.")
@click.option("--force", is_flag=True, help="Replace an existing OUTPUT.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors and warnings only.")
@click.version_option(__version__)
def main(inputs: tuple[str, ...], model: str, output: str, **options: Any) -> None:
    """Embed every text of INPUT... with MODEL.

    INPUT is a file, a glob, a folder, or - for standard input. MODEL is a file that sbert-export
    wrote, or a checkpoint: a folder, or a name on the Hugging Face hub, with @REVISION if need be.
    """
    try:
        summary = _embed(inputs, model, output, options)
    except SbertInferError as error:
        raise SystemExit(_error(str(error))) from None
    except OSError as error:
        raise SystemExit(_error(_os_message(error, output))) from None
    except KeyboardInterrupt:
        click.echo("\ninterrupted: run the same command again to go on", err=True)
        raise SystemExit(130) from None
    if not options["quiet"]:
        click.echo(summary)


def _embed(inputs: tuple[str, ...], model: str, output: str, options: dict[str, Any]) -> str:
    ray = options["ray"]
    _check_together(inputs, options)
    job = _import("job").make_job(inputs, model, options)
    flags = {name: options[name] for name in ("restart", "force", "quiet")}
    if ray is not None:
        on_ray = _import("ray.job")
        cpus, gpus, actors = options["ray_cpus"] or 1, options["ray_gpus"] or 0, options["ray_actors"]
        cluster = on_ray.RayOptions(None if ray == "auto" else ray, cpus, gpus, actors)
        return str(on_ray.embed_on_ray(job, output, cluster, **flags))
    target = _import("write.output").make_output(Path(output), options["format"], options["compression"])
    stop = options["on_error"] == "fail"
    return str(_import("local").embed(job, target, workers=options["workers"], stop_at_bad_row=stop, **flags))


def _check_together(inputs: tuple[str, ...], options: dict[str, Any]) -> None:
    """Refuse options that are not for a cluster with `--ray`, and those that are without it."""
    ray = options["ray"]
    names = (
        ("ray_cpus", "ray_gpus", "ray_actors")
        if ray is None
        else ("format", "workers", "limit", "compression", "compute")
    )
    wrong = [f"--{name.replace('_', '-')}" for name in names if options[name] is not None]
    if ray is not None and options["on_error"] == "fail":
        wrong.append("--on-error fail")
    if ray is not None and options["reuse"]:
        wrong.append("--reuse")
    if ray is not None and "-" in inputs:
        wrong.append("standard input")
    if wrong:
        raise click.UsageError(f"{', '.join(wrong)} can't be used {'with' if ray else 'without'} --ray")
    if options["compute"] and (options["device"] or options["workers"]):
        raise click.UsageError("--compute auto chooses --device and --workers: leave them out")
    if ray not in (None, "auto", "local") and ":" not in ray:
        raise click.UsageError(
            f"{ray!r} is no address of a Ray cluster: give HOST:PORT, or --ray=auto before other words"
        )


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
