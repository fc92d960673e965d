"""The command `sbert-tune`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from sbert_infer import __version__
from sbert_infer.artifact.canaries import canaries_of
from sbert_infer.artifact.manifest import Artifact
from sbert_infer.backends.choice import Choice, remember
from sbert_infer.errors import SbertInferError
from sbert_infer.tune.candidates import Candidate, file_of, open_artifacts
from sbert_infer.tune.report import make_report, render
from sbert_infer.tune.search import choice_of, search
from sbert_infer.tune.workload import make_workload

EXAMPLES = """\b
Examples:
  sbert-tune model.onnx                                  how does it run fastest here?
  sbert-tune model.onnx model.bf16.onnx model.plan       or one of these files in its place
  sbert-tune model.onnx model.int8.onnx --min-cosine 0.98
  sbert-tune model.onnx --texts corpus.txt               timed with texts like yours
  sbert-serve model.onnx --compute auto                  runs what was chosen, as does Engine(..., compute="auto")

The choice is for the first ARTIFACT, on this machine, until a package, the processor, the number of cores or a file
changes. The exit code is 0 if there is a choice, 1 if nothing is near enough or a file can't be used, 2 for a wrong
option, and 130 after Ctrl-C.
"""
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_MIN_COSINE = 0.9995


@click.command("sbert-tune", epilog=EXAMPLES, context_settings=_CONTEXT)
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
@click.option("--texts", type=_FILE, help="File with texts to time. [those that ARTIFACT holds]")
@click.option("--text-column", default="text", show_default=True, metavar="NAME", help="Column that holds them.")
@click.option(
    "--min-cosine",
    type=click.FloatRange(0, 1),
    default=_MIN_COSINE,
    show_default=True,
    help="Lowest cosine to the eager model's vectors, on the texts that ARTIFACT holds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.version_option(__version__)
def main(artifacts: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Find the fastest way to run a model on this machine, and remember it for `compute="auto"`.

    The first ARTIFACT is what will be opened; any others are files of the same checkpoint that may
    run in its place. What differs too much from the eager model is left out.
    """
    try:
        report = _tune(open_artifacts(artifacts), options)
    except KeyboardInterrupt:
        click.echo("\ninterrupted: nothing was remembered", err=True)
        sys.exit(130)
    except (SbertInferError, OSError) as error:
        file = error if isinstance(error, OSError) and error.filename is not None else None
        message = str(error) if file is None else f"{file.filename}: {file.strerror}"  # None: the network
        click.echo(f"error: {' '.join(message.split())}", err=True)
        sys.exit(1)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    click.echo(json.dumps(report, indent=2, ensure_ascii=False) if as_json else render(report))
    if report["error"]:
        click.echo(f"error: {report['error']}", err=True)
        sys.exit(1)


def _tune(artifacts: list[Artifact], options: dict[str, Any]) -> dict[str, Any]:
    first, min_cosine = artifacts[0], options["min_cosine"]
    canaries = canaries_of(first)
    assert canaries is not None  # noqa: S101  # as `open_artifacts` has seen
    workload = make_workload(first.manifest, canaries, options["texts"], options["text_column"])
    with tqdm(bar_format="{desc}", disable=None, leave=False) as bar:  # None: on a terminal only

        def trying(candidate: Candidate) -> None:
            bar.set_description_str(f"trying {file_of(candidate)}, {_shown(candidate)}")

        found = search(artifacts, workload, min_cosine, trying, lambda news: bar.write(news, file=sys.stderr))
    choice: Choice | None = None
    error: str | None = None
    try:
        choice = choice_of(found, min_cosine, _command(artifacts, options))
        remember(first, choice)
    except SbertInferError as problem:
        error = str(problem)
    return make_report(first, workload, found, min_cosine, choice, error)


def _shown(candidate: Candidate) -> str:
    names = ("device", "workers", "threads", "max_batch_tokens")
    given = {name: getattr(candidate.options, name) for name in names}
    return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None) or "the default"


def _command(artifacts: list[Artifact], options: dict[str, Any]) -> str:
    """Return the command that does this again, from any folder."""
    words = ["sbert-tune", *(str(artifact.path.absolute()) for artifact in artifacts)]
    if options["min_cosine"] != _MIN_COSINE:
        words += ["--min-cosine", f"{options['min_cosine']:g}"]
    if options["texts"] is not None:
        words += ["--texts", str(options["texts"].absolute())]
        words += ["--text-column", options["text_column"]] if options["text_column"] != "text" else []
    return shlex.join(words)
