"""The command `sbert-bench`."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sbert_infer import __version__
from sbert_infer.errors import SbertInferError

if TYPE_CHECKING:
    from sbert_infer.bench.results import Results

EXAMPLES = """\b
Examples:
  sbert-bench model.onnx                           against eager PyTorch (from model/) and what is installed
  sbert-bench model/                               exports FP32 and int8 first, and measures both
  sbert-bench model.onnx model.int8.onnx --workload short --workload long
  sbert-bench model.onnx --texts mine.txt --latency --html report.html
  sbert-bench model.onnx --sts sts-test.tsv --json today.json
  sbert-bench model.onnx --rivals-python .venv-rivals/bin/python
  sbert-bench compare before.json after.json       what got slower

The contestants take turns in rounds, each in a process of its own, and what they computed is compared with the eager
model: one with wrong vectors is shown as wrong, not as fast. The exit code is 1 if one of ours is wrong.
"""
COMPARE_EXAMPLES = """\b
Examples:
  sbert-bench compare before.json after.json
  sbert-bench compare before.json after.json --tolerance 0.05
"""
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.command("sbert-bench", epilog=EXAMPLES, context_settings=_SETTINGS)
@click.argument("sources", nargs=-1, required=True, metavar="ARTIFACT_OR_CHECKPOINT...")
@click.option("--checkpoint", metavar="DIR", help="What the artifacts were made from. [model.onnx: model/ beside it]")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(["short", "medium", "long", "mixed"]),
    help="Kind of texts; may be repeated. [mixed]",
)
@click.option("--texts", "texts_file", type=_FILE, help="Your own texts instead, one a line.")
@click.option("--num-texts", type=click.IntRange(min=1), default=500, show_default=True, help="Texts per workload.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each contestant.")
@click.option("--seed", type=int, default=0, show_default=True, help="For the making of texts.")
@click.option("--latency", is_flag=True, help="Also one text at a time: p50, p95, p99.")
@click.option("--sts", type=_FILE, help="STS benchmark file, tab-separated: adds the Spearman correlation.")
@click.option("--only", multiple=True, metavar="NAME", help="Contestants with NAME in their name; may be repeated.")
@click.option(
    "--rivals-python",
    metavar="PATH",
    envvar="SBERT_BENCH_RIVALS_PYTHON",
    show_envvar=True,
    help="Interpreter that has the other libraries. [this one]",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the model code that the checkpoint brings along.")
@click.option("--markdown", is_flag=True, help="Print the table as markdown.")
@click.option("--json", "json_file", type=_OUTPUT, help="Write all figures to this file, for `compare`.")
@click.option("--html", "html_file", type=_OUTPUT, help="Write one self-contained page with plots.")
@click.version_option(__version__)
def run(
    sources: tuple[str, ...],
    checkpoint: str | None,
    workloads: tuple[str, ...],
    texts_file: Path | None,
    num_texts: int,
    rounds: int,
    seed: int,
    latency: bool,
    sts: Path | None,
    only: tuple[str, ...],
    rivals_python: str | None,
    trust_remote_code: bool,
    markdown: bool,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Measure exported models against the eager PyTorch reference and other libraries."""
    with _plain_errors(), _temporary_folder() as folder, _progress() as progress:
        from sbert_infer.bench.session import Settings, run_session
        from sbert_infer.bench.subject import open_subject
        from sbert_infer.bench.table import render_table

        _check_outputs(json_file, html_file)
        settings = Settings(
            rounds=rounds,
            seed=seed,
            latency_texts=_LATENCY_TEXTS if latency else 0,
            sts=sts,
            rivals_python=_interpreter(rivals_python),
            only=only,
            trust_remote_code=trust_remote_code,
        )
        texts = _make_workloads(workloads, texts_file, num_texts, seed)
        subject = open_subject(sources, checkpoint, folder, trust_remote_code=trust_remote_code, announce=progress)
        results = run_session(subject, texts, settings, folder, progress)
    with _plain_errors():
        _write(results, json_file, html_file)
    click.echo(render_table(results, markdown=markdown))
    if "interrupted" in results.stamp:
        raise SystemExit(128 + signal.SIGINT)
    if not results.ours_are_right:
        raise SystemExit(1)


@click.command("sbert-bench compare", epilog=COMPARE_EXAMPLES, context_settings=_SETTINGS)
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.option("--tolerance", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Loss that is noise.")
def compare(before: Path, after: Path, tolerance: float) -> None:
    """Show what got slower or faster between two JSON files; exit with 1 if one of ours got slower."""
    with _plain_errors():
        from sbert_infer.bench import compare as comparison
        from sbert_infer.bench.results import ResultsError, load_results

        old, new = load_results(before), load_results(after)
        changes = comparison.compare(old, new)
        if not changes:
            raise ResultsError(f"{before} and {after} have no contestant and workload in common")
    for line in comparison.warnings(old, new):
        click.echo(f"warning: {line}", err=True)
    click.echo(comparison.render_changes(changes, tolerance))
    if any(change.ours and change.got_slower(tolerance) for change in changes):
        raise SystemExit(1)


def main() -> None:
    """`sbert-bench compare ...` compares; anything else is something to measure."""
    if sys.argv[1:2] == ["compare"]:
        compare(sys.argv[2:], prog_name="sbert-bench compare")
    run(prog_name="sbert-bench")


_LATENCY_TEXTS = 100


def _make_workloads(names: tuple[str, ...], file: Path | None, num_texts: int, seed: int) -> dict[str, tuple[str, ...]]:
    from sbert_infer.bench.workloads import WorkloadError, make_workload, read_workload

    if file is not None and names:
        raise WorkloadError("--texts takes the place of --workload: give one of them")
    if file is not None:
        return {file.stem: read_workload(file, num_texts)}
    return {name: make_workload(name, num_texts, seed) for name in names or ("mixed",)}


def _interpreter(path: str | None) -> str:
    from sbert_infer.bench.subject import BenchError

    if not path:
        return sys.executable
    found = shutil.which(path)
    if found is None:
        raise BenchError(f"--rivals-python {path} is not a program")
    return str(Path(found).absolute())  # not resolved: a virtual environment is known by its link


def _check_outputs(*files: Path | None) -> None:
    """Before the long run, not after it."""
    from sbert_infer.bench.subject import BenchError

    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise BenchError(f"the folder {file.parent} does not exist")


def _write(results: Results, json_file: Path | None, html_file: Path | None) -> None:
    from sbert_infer.bench.page import render_page
    from sbert_infer.bench.results import save_results

    if json_file is not None:
        save_results(results, json_file)
    if html_file is not None:
        html_file.write_text(render_page(results), encoding="utf-8")


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except SbertInferError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
    except OSError as error:
        click.echo(f"error: {error.filename or ''}: {error.strerror or error}", err=True)
        raise SystemExit(1) from None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sbert-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(os.path.realpath(folder))


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """On a terminal, a line that says what is being done and for how long already."""
    from tqdm import tqdm

    with tqdm(bar_format="{desc}  [{elapsed}]", leave=False, disable=None) as bar:  # None: a terminal only
        yield lambda line: bar.set_description_str(line)


if __name__ == "__main__":
    main()
