"""What the commands share: options for texts, checks before a long run, errors, progress."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from sbert_infer.bench.errors import WorkloadError
from sbert_infer.bench.workloads import WORKLOADS, make_workload, read_workload
from sbert_infer.errors import SbertInferError

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DATASET = click.Path(exists=True, path_type=Path)  # a file, or a folder
OUTPUT = click.Path(dir_okay=False, path_type=Path)
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}  # of every command

_LINE_S = 30.0  # between two lines where there is no terminal

Command = TypeVar("Command", bound=Callable[..., object])


class _Workload(click.ParamType[tuple[str, int | None]]):
    """A kind of texts and, after a colon, how many of them."""

    name = "KIND[:COUNT]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int | None]:
        kind, colon, count = str(value).partition(":")
        kind = click.Choice(list(WORKLOADS))(kind, param, ctx)
        return kind, click.IntRange(min=1)(count, param, ctx) if colon else None


def text_options(command: Command) -> Command:
    """Add the options that choose texts: the arguments of `make_workloads` but for the seed."""
    kinds = f"Kind of texts, repeatable: {', '.join(WORKLOADS)}; 'long:60' makes 60 of them. [mixed]"
    options = [
        click.option("--workload", "workloads", multiple=True, type=_Workload(), help=kinds),
        click.option("--texts", "texts_file", type=FILE, help="Your own texts instead, one per line."),
        click.option(
            "--num-texts", type=click.IntRange(min=1), default=500, show_default=True, help="Texts per workload."
        ),
    ]
    for option in reversed(options):  # the last one added is shown first
        command = option(command)
    return command


def make_workloads(
    kinds: tuple[tuple[str, int | None], ...], file: Path | None, num_texts: int, seed: int
) -> dict[str, tuple[str, ...]]:
    """Make the texts of each workload asked for (kind, count), or read those of a file."""
    if file is not None and kinds:
        raise WorkloadError("--texts takes the place of --workload: give one of them")
    if file is not None:
        return {file.stem: read_workload(file, num_texts)}
    return {kind: make_workload(kind, count or num_texts, seed) for kind, count in kinds or [("mixed", None)]}


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show errors of this package and of the system as one line, and exit with 1; Ctrl-C is 130."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        raise SystemExit(128 + signal.SIGINT) from None
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed, sbert-bench needs it"
        click.echo(f"error: {missing}: pip install 'sbert-infer[bench]'", err=True)
        raise SystemExit(1) from None
    except SbertInferError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
    except OSError as error:
        click.echo(f"error: {error.filename or ''}: {error.strerror or error}", err=True)
        raise SystemExit(1) from None


@contextmanager
def long_run(*outputs: Path | None) -> Iterator[tuple[Path, Callable[[str], object]]]:
    """Give a temporary folder, and a function that shows the current step.

    On a terminal it replaces the one before; elsewhere it is a line now and then. The folders of
    `outputs` are made before the long run rather than after it.
    """
    from tqdm import tqdm

    with (
        plain_errors(),
        tempfile.TemporaryDirectory(prefix="sbert-bench-", ignore_cleanup_errors=True) as folder,
        tqdm(bar_format="{desc}  [{elapsed}]", leave=False, disable=None) as bar,  # None: a terminal only
    ):
        for file in outputs:
            if file is not None:
                file.absolute().parent.mkdir(parents=True, exist_ok=True)
        yield Path(os.path.realpath(folder)), _Lines() if bar.disable else bar.set_description_str


class _Lines:
    """Shows a step as a line on standard error, if the last line is some time ago."""

    def __init__(self) -> None:
        self._at = -math.inf

    def __call__(self, step: str) -> None:
        if time.monotonic() - self._at >= _LINE_S:
            self._at = time.monotonic()
            click.echo(step, err=True)


def finish(table: str, stamp: Mapping[str, object], *, right: bool) -> None:
    """Print the table; exit with 130 if the run was interrupted, with 1 if a result was wrong."""
    click.echo(table)
    if "interrupted" in stamp:
        raise SystemExit(128 + signal.SIGINT)
    if not right:
        raise SystemExit(1)
