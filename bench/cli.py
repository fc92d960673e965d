"""The commands `sbert-bench` and `sbert-bench compare`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import click

from sbert_infer import __version__
from sbert_infer.bench.console import (
    DATASET,
    FILE,
    OUTPUT,
    SETTINGS,
    finish,
    long_run,
    make_workloads,
    plain_errors,
    text_options,
)
from sbert_infer.bench.errors import BenchError, ResultsError

EXAMPLES = """\b
Examples:
  sbert-bench model.onnx                           against eager PyTorch (from model/) and what is installed
  sbert-bench model/                               exports FP32, int8 and, where it runs, BF16 first, and measures all
  sbert-bench model.onnx model.int8.onnx --workload short:300 --workload long:60
  sbert-bench model.onnx --texts mine.txt --latency --html report.html
  sbert-bench model.onnx --sts sts-test.tsv --json today.json
  sbert-bench model.onnx --only-quality --sts STS12.jsonl --sts STS13.jsonl --beir scifact/
  sbert-bench reranker.onnx                        pairs/s against CrossEncoder
  sbert-bench model.onnx --rivals-python .venv-rivals/bin/python
  sbert-bench model/ --device cuda                 exports plans first; TensorRT, onnxruntime, eager FP16, on a GPU
  sbert-bench compare before.json after.json       what got slower
  sbert-bench --serve http://127.0.0.1:8080        load on a server, see sbert-bench --serve --help

The contestants take turns in rounds, each in a process of its own, and their vectors are compared with those of the
eager model: a contestant with wrong vectors is shown as wrong, not as fast. The exit code is 1 if one of ours is wrong.
"""
COMPARE_EXAMPLES = """\b
Examples:
  sbert-bench compare before.json after.json
  sbert-bench compare before.json after.json --tolerance 0.05
"""
_LATENCY_TEXTS = 100


@click.command("sbert-bench", epilog=EXAMPLES, context_settings=SETTINGS)
@click.argument("sources", nargs=-1, required=True, metavar="ARTIFACT_OR_CHECKPOINT...")
@click.option("--checkpoint", metavar="DIR", help="What the artifacts were made from. [model/ beside model.onnx]")
@text_options
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Who takes part, and where."
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns per contestant.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed for making texts.")
@click.option("--latency", is_flag=True, help="Also one text at a time: p50, p95, p99.")
@click.option(
    "--sts", multiple=True, type=DATASET, help="Pairs with scores: adds the Spearman correlation; repeatable."
)
@click.option(
    "--pairs",
    multiple=True,
    type=DATASET,
    help="Pairs with labels 0 or 1: adds the average precision; repeatable.",
)
@click.option(
    "--beir",
    multiple=True,
    type=DATASET,
    help="Folder in BEIR's layout: adds nDCG@10, recall, MRR@10; repeatable.",
)
@click.option("--only-quality", is_flag=True, help="Measure only quality: --sts, --pairs and --beir.")
@click.option("--only", multiple=True, metavar="NAME", help="Only contestants with NAME in their name; repeatable.")
@click.option(
    "--rivals-python",
    metavar="PATH",
    envvar="SBERT_BENCH_RIVALS_PYTHON",
    show_envvar=True,
    help="Interpreter that has the other libraries. [this one]",
)
@click.option("--trust-remote-code", is_flag=True, help="Run model code from the checkpoint.")
@click.option("--markdown", is_flag=True, help="Print the table as markdown.")
@click.option("--json", "json_file", type=OUTPUT, help="Write all figures to this file, for `compare`.")
@click.option("--html", "html_file", type=OUTPUT, help="Write a self-contained page with plots.")
@click.version_option(__version__)
def run(
    sources: tuple[str, ...],
    checkpoint: str | None,
    workloads: tuple[tuple[str, int | None], ...],
    texts_file: Path | None,
    num_texts: int,
    latency: bool,
    only_quality: bool,
    rivals_python: str | None,
    markdown: bool,
    json_file: Path | None,
    html_file: Path | None,
    **options: Any,
) -> None:
    """Measure exported models against the eager PyTorch reference and other libraries."""
    with long_run(json_file, html_file) as (folder, progress):
        from sbert_infer.bench.contest.models_under_test import open_models
        from sbert_infer.bench.report.page import render_page
        from sbert_infer.bench.report.results import write_reports
        from sbert_infer.bench.report.table import render_table
        from sbert_infer.bench.session import Settings, run_session

        settings = Settings(
            latency_texts=_LATENCY_TEXTS if latency else 0, rivals_python=_interpreter(rivals_python), **options
        )
        if only_quality and not (settings.sts or settings.pairs or settings.beir):
            raise BenchError("--only-quality needs data: add --sts, --pairs or --beir")
        if only_quality and (workloads or texts_file or latency):
            raise BenchError("--only-quality measures no speed: leave out --workload, --texts and --latency")
        texts = {} if only_quality else make_workloads(workloads, texts_file, num_texts, settings.seed)
        models = open_models(
            sources,
            checkpoint,
            folder,
            device=settings.device,
            trust_remote_code=settings.trust_remote_code,
            announce=progress,
        )
        results = run_session(models, texts, settings, folder, progress)
        write_reports(results, json_file, html_file, render_page)
    finish(render_table(results, markdown=markdown), results.stamp, right=results.ours_are_right)


@click.command("sbert-bench compare", epilog=COMPARE_EXAMPLES, context_settings=SETTINGS)
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option(
    "--tolerance", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Loss that counts as noise."
)
def compare(before: Path, after: Path, tolerance: float) -> None:
    """Show what got slower or faster between two JSON files; exit with 1 if ours got slower."""
    with plain_errors():
        from sbert_infer.bench.report import compare as comparison
        from sbert_infer.bench.report.results import load_results

        old, new = load_results(before), load_results(after)
        changes = comparison.compare(old, new)
        if not changes:
            raise ResultsError(f"{before} and {after} have no contestant and workload in common")
    for line in comparison.warnings(old, new):
        click.echo(f"warning: {line}", err=True)
    click.echo(comparison.render_changes(changes, tolerance))
    if any(change.before.ours and change.got_slower(tolerance) for change in changes):
        raise SystemExit(1)


def main() -> None:
    """Run `compare` if that is the first argument, a load test with `--serve`, else a benchmark."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["compare"]:
        compare(arguments[1:], prog_name="sbert-bench compare")
    if "--serve" in arguments:
        from sbert_infer.bench.load.cli import load

        load([argument for argument in arguments if argument != "--serve"], prog_name="sbert-bench --serve")
    run(prog_name="sbert-bench")


def _interpreter(path: str | None) -> str:
    if not path:
        return sys.executable
    found = shutil.which(path)
    if found is None:
        raise BenchError(f"--rivals-python {path} is not a program")
    return str(Path(found).absolute())  # not resolved: a virtual environment is known by its link


if __name__ == "__main__":
    main()
