"""The command `sbert-export`."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import click
from click.core import ParameterSource

from sbert_infer import __version__
from sbert_infer.artifact.manifest import ENCODER, MULTI_VECTOR, RERANKER, SPARSE_ENCODER, Manifest
from sbert_infer.errors import ExportError, SbertInferError

EXAMPLES = """\b
Examples:
  sbert-export model/                              writes model.onnx
  sbert-export model/ --int8                       writes model.int8.onnx, 8-bit, for CPUs
  sbert-export model/ --int8 --calibration my.txt  tuned on your own texts, one a line
  sbert-export model/ --fp16                       writes model.plan, FP16, for GPUs; runs on CPUs, too
  sbert-export model/ --fp16 --target sm89,sm120   with TensorRT-RTX engines for these GPUs inside
  sbert-export model/ --portable -o any.onnx       standard operators, for other runtimes
  sbert-export reranker/                           a cross-encoder, for Reranker("reranker.onnx")
  sbert-export splade/                             a sparse encoder: Engine("splade.onnx") gives CSR matrices
  sbert-export --inspect model.plan                what is inside a file
  sbert-export model.onnx --triton-repository dir  serve it with Triton Inference Server
  sbert-export sentence-transformers/all-MiniLM-L6-v2

The vectors are compared with those of the eager PyTorch model before anything is written; if they differ too
much, nothing is, and the exit code is 1.
"""


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("checkpoint")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write, or a folder to put it in.")
@click.option("--int8", is_flag=True, help="8-bit weights and activations, for CPUs.")
@click.option("--fp16", is_flag=True, help="A plan for GPUs: FP16, with TensorRT engines inside.")
@click.option("--portable", is_flag=True, help="Standard ONNX operators only, for runtimes other than onnxruntime.")
@click.option("--max-length", type=click.IntRange(min=1), metavar="N", help="Limit texts to N tokens.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Texts like yours, one a line: --int8 is tuned on them, --fp16 cut into buckets of their lengths.",
)
@click.option(
    "--target",
    metavar="GPUS",
    help="GPUs to build engines for, such as sm89,sm120, with TensorRT-RTX, or none. [this machine's GPU]",
)
@click.option(
    "--lengths",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For --fp16: how many tokens your texts have, one number a line.",
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
    "of bge-m3 sentence,sparse,multi. [sentence]",
)
@click.option("--route", metavar="NAME", help="Which route to export, of a model that has several (Router, Asym).")
@click.option("--min-cosine", type=float, metavar="X", help="Lowest cosine accepted. [0.9999; fp16: 0.999; int8: 0.98]")
@click.option(
    "--triton-repository",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Also write a model repository for Triton Inference Server. CHECKPOINT may then be an artifact.",
)
@click.option("--inspect", is_flag=True, help="Show what is inside an artifact, and check it; nothing is written.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model code that the checkpoint brings along.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors and warnings only.")
@click.version_option(__version__)
def main(
    checkpoint: str,
    output: Path | None,
    int8: bool,
    fp16: bool,
    portable: bool,
    max_length: int | None,
    calibration: Path | None,
    target: str | None,
    lengths: Path | None,
    max_batch_tokens: int | None,
    pooling: str,
    outputs: str,
    route: str | None,
    min_cosine: float | None,
    triton_repository: Path | None,
    inspect: bool,
    force: bool,
    trust_remote_code: bool,
    quiet: bool,
) -> None:
    """Turn a trained Sentence-BERT CHECKPOINT (a folder or a hub id) into one optimized file."""
    try:
        if inspect:
            from sbert_infer.export.report import inspect as report

            click.echo(report(Path(checkpoint)))
            return
        if triton_repository is not None and Path(checkpoint).is_file():
            _check_only("checkpoint", "triton_repository", "force", "quiet")
            _write_repository(Path(checkpoint), triton_repository, force, quiet)
            return
        if calibration is not None and not (int8 or fp16):
            raise ExportError("--calibration is for --int8 and --fp16")
        if max_batch_tokens is not None and not fp16:
            raise ExportError("--max-batch-tokens is for --fp16")
        exporter = _import("exporter")
        options = exporter.ExportOptions(
            int8=int8,
            fp16=fp16,
            portable=portable,
            max_length=max_length,
            calibration=_read_lines(calibration),
            lengths=_read_lengths(lengths),
            targets=_split_targets(target),
            **({} if max_batch_tokens is None else {"max_batch_tokens": max_batch_tokens}),
            pooling=pooling,
            outputs=[name.strip() for name in outputs.split(",")],
            route=route,
            min_cosine=min_cosine,
            force=force,
            trust_remote_code=trust_remote_code,
        )
        path = output or exporter.default_output(checkpoint, options)
        if path.is_dir():
            path = path / exporter.default_output(checkpoint, options).name
        if triton_repository is not None:
            _import("triton_server.repository").check_repository(path, triton_repository, force)
        manifest = exporter.export(checkpoint, path, options, step=_silent_step if quiet else _printed_step)
        _warn_unfused(manifest, portable)
        _warn_plain(Path(checkpoint), manifest)
        if not quiet:
            click.echo(_summary(manifest, path, portable))
        if triton_repository is not None:
            _write_repository(path, triton_repository, force, quiet)
    except SbertInferError as error:
        raise SystemExit(_error(str(error))) from None
    except OSError as error:
        raise SystemExit(_error(f"{error.filename or checkpoint}: {error.strerror or error}")) from None


def _import(name: str) -> ModuleType:
    """A module of the export. Imported late: torch takes seconds, which `--help` should not."""
    try:
        return importlib.import_module(f"sbert_infer.export.{name}")
    except ImportError as error:
        message = f"{error.name} is not installed, exporting needs it: pip install 'sbert-infer[export]'"
        raise ExportError(message) from error


def _check_only(*names: str) -> None:
    """Refuse options that would have no effect on an artifact that is there already."""
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


def _split_targets(text: str | None) -> list[str] | None:
    """`sm89,sm120` -> both; `none` -> none; nothing -> what is best here."""
    if text is None:
        return None
    names = [name.strip().lower().replace("_", "") for name in text.split(",")]
    if names == ["none"]:
        return []
    if "none" in names or "" in names:
        raise ExportError(f"--target takes GPUs such as sm89,sm120, or none; got {text!r}")
    return names


@contextmanager
def _silent_step(name: str, detail: str, total: int) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


@contextmanager
def _printed_step(name: str, detail: str, total: int) -> Iterator[Callable[[int], object]]:
    """A line when the step is done; meanwhile, on a terminal, a bar or the line without its time."""
    from tqdm import tqdm

    start = time.perf_counter()
    label = f"{name:<9} {detail}"
    style = None if total else "{desc} ... {elapsed}"
    with tqdm(total=total or None, desc=label, leave=False, disable=None, bar_format=style) as bar:  # None: a tty only
        yield bar.update
    click.echo(f"{label}  {time.perf_counter() - start:.1f} s", err=True)


def _warn_unfused(manifest: Manifest, portable: bool) -> None:
    fusion = manifest.fusion
    wanted = {"attention": fusion["layers"], "gelu": fusion["gelu_layers"]}
    missing = [f"{name} {fusion[name]} of {n}" for name, n in wanted.items() if fusion[name] < n]
    if missing and not portable:
        click.echo(f"warning: not all of the graph was fused ({', '.join(missing)}): it is right, but slower", err=True)


def _warn_plain(checkpoint: Path, manifest: Manifest) -> None:
    """A language model, a reranker among them, becomes a sentence encoder as easily as any transformer does."""
    plain = checkpoint.is_dir() and not (checkpoint / "modules.json").is_file() and manifest.kind == ENCODER
    if plain:
        message = "no modules.json: taken as a plain transformer with mean pooling, as sentence-transformers would"
        click.echo(f"warning: {checkpoint} has {message}", err=True)


def _summary(manifest: Manifest, path: Path, portable: bool) -> str:
    fusion = manifest.fusion
    size = sum(file.stat().st_size for file in [path, *(path.parent / f.name for f in manifest.data_files)])
    graph = "graph    standard operators only"
    if not portable:
        nodes = (
            f"{fusion['attention']} of {fusion['layers']} attention, {fusion['gelu']} of {fusion['gelu_layers']} gelu"
        )
        graph = f"fused    {nodes}; skip-layer-norm kept apart as add and norm, which is faster"
    if not fusion["layers"]:
        graph = "graph    a lookup and a mean: there is nothing to fuse"
    uses = {RERANKER: "Reranker({!r}).rank(query, [...])", MULTI_VECTOR: "Engine({!r}).encode_query([...])"}
    use = uses.get(manifest.kind, "Engine({!r}).encode([...])")
    lines = [
        f"{path}  {size / 1e6:.1f} MB, {manifest.precision}, weights sha256 {manifest.weights_sha256[:12]}",
        f"  {graph}",
        f"  parity   {_parity(manifest)} of up to {manifest.parity['max_length']} tokens",
        *_engines(path),
        f"  use      {use.format(str(path))}",
    ]
    return "\n".join(lines)


def _parity(manifest: Manifest) -> str:
    parity = manifest.parity
    if manifest.kind == RERANKER:
        difference = f"max-abs {parity['max_abs']:.1e} of scores that spread by {parity['spread']:.1e}"
        return f"{difference}, {parity['rank_agreement']:.2%} in the same order, on {parity['pairs']} pairs"
    cosine = f"cosine min {parity['min_cosine']:.6f}, mean {parity['mean_cosine']:.6f}"
    difference = f"max-abs {parity['max_abs']:.1e}"
    if manifest.kind == MULTI_VECTOR:
        return f"{cosine}, {difference} of the tokens of {parity['texts']} texts"
    difference += f", top-10 overlap {parity['top10_overlap']:.1%}"
    if manifest.kind == SPARSE_ENCODER:
        difference += f", {parity['active_overlap']:.2%} of {parity['active_dims']:.0f} active dimensions"
    return f"{cosine}, {difference}, on {parity['texts']} texts"


def _engines(path: Path) -> list[str]:
    """What a plan has for GPUs."""
    from sbert_infer.artifact import open_artifact
    from sbert_infer.artifact.plan_file import Plan

    plan = open_artifact(path)
    if not isinstance(plan, Plan):
        return []
    names = ", ".join(engine.describe() for engine in plan.engines)
    missing = "none inside: one is built at first use on a machine with a GPU and TensorRT; or see --target"
    return [f"  engines  {names or missing}"]


def _error(message: str) -> int:
    click.echo(f"error: {message}", err=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
