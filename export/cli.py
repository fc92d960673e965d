"""The command `sbert-export`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import click

from sbert_infer import __version__
from sbert_infer.artifact import Manifest
from sbert_infer.errors import ExportError, SbertInferError

EXAMPLES = """\b
Examples:
  sbert-export model/                              writes model.onnx
  sbert-export model/ --int8                       writes model.int8.onnx, 8-bit, for CPUs
  sbert-export model/ --int8 --calibration my.txt  tuned on your own texts, one a line
  sbert-export model/ --portable -o any.onnx       standard operators, for other runtimes
  sbert-export sentence-transformers/all-MiniLM-L6-v2

The vectors are compared with those of the eager PyTorch model before anything is written; if they differ too
much, nothing is, and the exit code is 1.
"""


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("checkpoint")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write, or a folder to put it in.")
@click.option("--int8", is_flag=True, help="8-bit weights and activations, for CPUs.")
@click.option("--portable", is_flag=True, help="Standard ONNX operators only, for runtimes other than onnxruntime.")
@click.option("--max-length", type=click.IntRange(min=1), metavar="N", help="Limit texts to N tokens.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Texts like yours, one a line: --int8 is tuned on them.",
)
@click.option("--min-cosine", type=float, metavar="X", help="Lowest cosine accepted. [0.9999; --int8: 0.98]")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model code that the checkpoint brings along.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors and warnings only.")
@click.version_option(__version__)
def main(
    checkpoint: str,
    output: Path | None,
    int8: bool,
    portable: bool,
    max_length: int | None,
    calibration: Path | None,
    min_cosine: float | None,
    force: bool,
    trust_remote_code: bool,
    quiet: bool,
) -> None:
    """Turn a trained Sentence-BERT CHECKPOINT (a folder or a hub id) into one optimized file."""
    try:
        if calibration is not None and not int8:
            raise ExportError("--calibration tunes --int8: give both or neither")
        exporter = _import_exporter()
        options = exporter.ExportOptions(
            int8=int8,
            portable=portable,
            max_length=max_length,
            calibration=_read_lines(calibration),
            min_cosine=min_cosine,
            force=force,
            trust_remote_code=trust_remote_code,
        )
        target = output or exporter.default_output(checkpoint, options)
        if target.is_dir():
            target = target / exporter.default_output(checkpoint, options).name
        manifest = exporter.export_onnx(checkpoint, target, options, step=_silent_step if quiet else _printed_step)
    except SbertInferError as error:
        raise SystemExit(_error(str(error))) from None
    except OSError as error:
        raise SystemExit(_error(f"{error.filename or checkpoint}: {error.strerror or error}")) from None
    _warn_unfused(manifest, portable)
    if not quiet:
        click.echo(_summary(manifest, target, portable))


def _import_exporter() -> ModuleType:
    """Imported late: torch takes seconds, which `--help` should not."""
    try:
        from sbert_infer.export import exporter
    except ImportError as error:
        message = f"{error.name} is not installed, exporting needs it: pip install 'sbert-infer[export]'"
        raise ExportError(message) from error
    return exporter


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


@contextmanager
def _silent_step(name: str, detail: str, total: int) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


@contextmanager
def _printed_step(name: str, detail: str, total: int) -> Iterator[Callable[[int], object]]:
    """A line when the step is done; meanwhile, on a terminal, a bar or the line without its time."""
    from tqdm import tqdm

    start = time.perf_counter()
    label = f"{name:<9} {detail}"
    style = None if total else "{desc} ..."
    with tqdm(total=total or None, desc=label, leave=False, disable=None, bar_format=style) as bar:  # None: a tty only
        yield bar.update
    click.echo(f"{label}  {time.perf_counter() - start:.1f} s", err=True)


def _warn_unfused(manifest: Manifest, portable: bool) -> None:
    fusion = manifest.fusion
    wanted = {"attention": fusion["layers"], "gelu": fusion["gelu_layers"]}
    missing = [f"{name} {fusion[name]} of {n}" for name, n in wanted.items() if fusion[name] < n]
    if missing and not portable:
        click.echo(f"warning: not all of the graph was fused ({', '.join(missing)}): it is right, but slower", err=True)


def _summary(manifest: Manifest, target: Path, portable: bool) -> str:
    parity, fusion = manifest.parity, manifest.fusion
    size = sum(path.stat().st_size for path in [target, *(target.parent / f.name for f in manifest.data_files)])
    graph = "graph    standard operators only"
    if not portable:
        nodes = (
            f"{fusion['attention']} of {fusion['layers']} attention, {fusion['gelu']} of {fusion['gelu_layers']} gelu"
        )
        graph = f"fused    {nodes}; skip-layer-norm kept apart as add and norm, which is faster"
    cosine = f"cosine min {parity['min_cosine']:.6f}, mean {parity['mean_cosine']:.6f}"
    difference = f"max-abs {parity['max_abs']:.1e}, top-10 overlap {parity['top10_overlap']:.1%}"
    lines = [
        f"{target}  {size / 1e6:.1f} MB, {manifest.precision}, weights sha256 {manifest.weights_sha256[:12]}",
        f"  {graph}",
        f"  parity   {cosine}, {difference}, on {parity['texts']} texts of up to {parity['max_length']} tokens",
        f"  use      Engine({str(target)!r}).encode([...])",
    ]
    return "\n".join(lines)


def _error(message: str) -> int:
    click.echo(f"error: {message}", err=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
