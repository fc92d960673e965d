"""The command `sbert-export`."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from sbert_infer import __version__
from sbert_infer.errors import ExportError, SbertInferError
from sbert_infer.export import report
from sbert_infer.export.options import MAX_BATCH_TOKENS, ExportOptions, Progress, default_output, silent

EXAMPLES = """\b
Examples:
  sbert-export model/                              writes model.onnx
  sbert-export model/ --int8                       writes model.int8.onnx, 8-bit, for CPUs
  sbert-export model/ --fp32 --int8                writes both, in little more time than the slower one
  sbert-export model/ --int8 --calibration my.txt  tuned on your own texts, one per line
  sbert-export model/ --bf16                       writes model.bf16.onnx, for CPUs with BF16; runs on any
  sbert-export model/ --fp16                       writes model.plan, FP16, for GPUs; also runs on CPUs
  sbert-export model/ --fp16 --target sm89,sm120   with TensorRT-RTX engines for these GPUs inside
  sbert-export model/ --fp16 --bf16                in BF16, for a model that FP16 can't hold (T5, Gemma)
  sbert-export model/ --portable -o any.onnx       standard operators, for other runtimes
  sbert-export reranker/                           a cross-encoder, for Reranker("reranker.onnx")
  sbert-export splade/                             a sparse encoder: Engine("splade.onnx") gives CSR matrices
  sbert-export router/                             a Router: one file for queries and documents
  sbert-export router/ --route query -o query.onnx one of its routes, for sbert-serve or --fp16
  sbert-export --inspect model.plan                what is inside a file
  sbert-export model.onnx --triton-repository dir  serve it with Triton Inference Server
  sbert-export sentence-transformers/all-MiniLM-L6-v2

The vectors are compared with those of the eager PyTorch model before anything is written; if they differ too
much, nothing is, and the exit code is 1.
"""


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("checkpoint")
@click.option("-o", "--output", type=click.Path(), help="File to write, or a folder (FOLDER/) to put it in.")
@click.option("--fp32", is_flag=True, help="FP32, exact; the default, and to be named only beside another precision.")
@click.option("--int8", is_flag=True, help="8-bit weights and activations, for CPUs.")
@click.option("--fp16", is_flag=True, help="A plan for GPUs: FP16, with TensorRT engines inside.")
@click.option("--bf16", is_flag=True, help="BF16, half the size, for CPUs that have it; with --fp16, a plan in BF16.")
@click.option("--portable", is_flag=True, help="Standard ONNX operators only, for runtimes other than onnxruntime.")
@click.option("--max-length", type=click.IntRange(min=1), metavar="N", help="Limit texts to N tokens.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Texts like yours, one per line: --int8 is tuned on them, --fp16 chooses its row lengths by them.",
)
@click.option(
    "--target",
    multiple=True,
    metavar="GPUS",
    help="GPUs to build TensorRT-RTX engines for, such as sm89,sm120, or none. [this machine's GPU]",
)
@click.option(
    "--lengths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For --fp16: how many tokens your texts have, one number per line.",
)
@click.option(
    "--max-batch-tokens", type=click.IntRange(min=1), metavar="N", help="For --fp16: tokens that run at once. [16384]"
)
@click.option(
    "--pooling",
    type=click.Choice(["graph", "kernel"]),
    default="graph",
    help="For --fp16: pool in the graph, or with the Triton kernel after it.",
)
@click.option(
    "--outputs",
    metavar="NAMES",
    default="sentence",
    help="sentence, or sentence,tokens: the graph also gives a vector for each token; "
    "for bge-m3 sentence,sparse,multi. [sentence]",
)
@click.option(
    "--route",
    metavar="NAME",
    help="Export this route only of a model that has several (Router, Asym). [query and document in one file]",
)
@click.option(
    "--min-cosine",
    type=float,
    metavar="X",
    help="Lowest cosine accepted. [0.9999; bf16: 0.9995; fp16: 0.999, with bf16 0.995; int8: 0.996, or else 0.985]",
)
@click.option(
    "--triton-repository",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Also write a model repository for Triton Inference Server. CHECKPOINT may then be an artifact.",
)
@click.option("--inspect", is_flag=True, help="Show what is inside an artifact, and check it; nothing is written.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model code that the checkpoint contains.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors and warnings only.")
@click.version_option(__version__)
def main(
    checkpoint: str, output: str | None, triton_repository: Path | None, inspect: bool, quiet: bool, **given: Any
) -> None:
    """Turn a trained Sentence-BERT CHECKPOINT (a folder or a hub id) into one optimized file."""
    try:
        if inspect:
            click.echo(report.inspect(Path(checkpoint)))
        elif triton_repository is not None and Path(checkpoint).is_file():
            _check_only("checkpoint", "triton_repository", "force", "quiet")
            _write_repository(Path(checkpoint), triton_repository, given["force"], quiet)
        else:
            _export(checkpoint, output, _options(**given), triton_repository, quiet)
    except (SbertInferError, OSError) as error:
        what = f"{error.filename or checkpoint}: {error.strerror or error}" if isinstance(error, OSError) else error
        click.echo(f"error: {what}", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        click.echo("stopped; what was not complete was not written", err=True)
        raise SystemExit(130) from None


def _options(
    *,
    calibration: Path | None,
    lengths: Path | None,
    target: tuple[str, ...],
    max_batch_tokens: int | None,
    pooling: str,
    outputs: str,
    fp32: bool,
    int8: bool,
    fp16: bool,
    bf16: bool,
    **same: Any,
) -> list[ExportOptions]:
    """The options of each artifact to export; `same` are those that all of them take as given."""
    if calibration is not None and not (int8 or fp16):
        raise ExportError("--calibration is for --int8 and --fp16")
    if max_batch_tokens is not None and not fp16:
        raise ExportError("--max-batch-tokens is for --fp16")
    same |= {"calibration": _read_lines(calibration), "outputs": [name.strip() for name in outputs.split(",")]}
    plan: dict[str, Any] = {
        "lengths": _read_lengths(lengths),
        "targets": _split_targets(",".join(target)) if target else None,
        "pooling": pooling,
        "max_batch_tokens": max_batch_tokens or MAX_BATCH_TOKENS,
    }
    if fp16:
        plans, others = [{"fp16": True, "bf16": bf16, **plan}], {}
    else:
        plans, others = [], plan  # refused by each if they are not the defaults
    precisions: list[dict[str, Any]] = [{}] if fp32 or not (int8 or fp16 or bf16) else []
    precisions += [{"bf16": True}] if bf16 and not fp16 else []
    precisions += [{"int8": True}] if int8 else []
    return [ExportOptions(**same, **one) for one in [*({**others, **one} for one in precisions), *plans]]


def _export(
    checkpoint: str, output: str | None, wanted: list[ExportOptions], repository: Path | None, quiet: bool
) -> None:
    """Export `checkpoint`, and to a Triton `repository` if given; print the results."""
    targets = [_target(checkpoint, output, options, several=len(wanted) > 1) for options in wanted]
    if repository is not None and len(wanted) > 1:
        raise ExportError("--triton-repository takes one precision at a time")
    exporter = _import("exporter")
    if repository is not None:
        _import("triton_server.repository").check_repository(targets[0], repository, wanted[0].force)
    pairs = list(zip(targets, wanted, strict=True))
    standard = {target: options.standard for target, options in pairs}
    for path, manifest in exporter.export_all(checkpoint, pairs, step=silent if quiet else _printed_step):
        for warning in report.warnings(checkpoint, manifest, standard[path]):
            click.echo(f"warning: {warning}", err=True)
        if not quiet:
            click.echo(report.summarize(manifest, path, standard[path]))
    if repository is not None:
        _write_repository(targets[0], repository, wanted[0].force, quiet)


def _target(checkpoint: str, output: str | None, options: ExportOptions, *, several: bool) -> Path:
    """Where to write the artifact with these options."""
    name = default_output(checkpoint, options)
    if output is None:
        return name
    path, is_folder = Path(output), output.endswith(("/", os.sep))
    if is_folder or path.is_dir() or (several and not path.suffix and not path.exists()):
        return path / name.name  # a folder that is not there yet is made
    if several:
        raise ExportError(f"several precisions are several files: -o must name a folder, and {path} is none")
    return path


def _import(name: str) -> ModuleType:
    """Import a module of the export late: torch takes seconds, which `--help` should not."""
    try:
        return importlib.import_module(f"sbert_infer.export.{name}")
    except ImportError as error:
        message = f"{error.name} is not installed, exporting needs it: pip install 'sbert-infer[export]'"
        raise ExportError(message) from error


def _check_only(*names: str) -> None:
    """Refuse options that would have no effect on an existing artifact."""
    context = click.get_current_context()
    given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if odd := [name for name in given if name not in names]:
        option = "--" + odd[0].replace("_", "-")
        raise ExportError(f"{option} is for exporting a checkpoint, but {context.params['checkpoint']} is a file")


def _write_repository(artifact: Path, folder: Path, force: bool, quiet: bool) -> None:
    repository = _import("triton_server.repository").write_repository(artifact, folder, force=force)
    if not quiet:
        click.echo(repository.summary())


def _read_lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        texts = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if not texts:
        raise ExportError(f"{path} holds no text")
    return texts


def _read_lengths(path: Path | None) -> list[int]:
    lines = [(number, line.strip()) for number, line in enumerate(_read_lines(path), 1)]
    for number, line in lines:
        if not (line.isascii() and line.isdigit() and int(line)):
            raise ExportError(f"{path}, line {number}: not a number of tokens: {line[:40]!r} (texts: --calibration)")
    return [int(line) for _, line in lines]


def _split_targets(text: str) -> list[str]:
    """`sm89,sm120` -> both; `none` -> an empty list."""
    names = [name.strip().lower().replace("_", "") for name in text.split(",")]
    if names == ["none"]:
        return []
    if "none" in names or "" in names:
        raise ExportError(f"--target takes GPUs such as sm89,sm120, or none; got {text!r}")
    return names


@contextmanager
def _printed_step(name: str, detail: str, total: int) -> Iterator[Progress]:
    """Print a line when the step is done; until then show a bar on a terminal."""
    from tqdm import tqdm

    start = time.perf_counter()
    label = f"{name:<9} {detail}"
    style = "{desc} {percentage:3.0f}% {bar} {elapsed}<{remaining}" if total else "{desc} ... {elapsed}"
    with tqdm(total=total or None, desc=label, leave=False, disable=None, bar_format=style) as bar:  # None: a tty only
        yield bar.update
    click.echo(f"{label}  {time.perf_counter() - start:.1f} s", err=True)


if __name__ == "__main__":
    sys.exit(main())
