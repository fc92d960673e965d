"""What the commands have in common: texts, checks before a long run, errors and progress for people."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from sbert_infer._util.files import staged
from sbert_infer.errors import SbertInferError

__all__ = [
    "DATASET",
    "FILE",
    "OUTPUT",
    "check_outputs",
    "make_workloads",
    "plain_errors",
    "progress_line",
    "temporary_folder",
    "text_options",
    "write_text",
]

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DATASET = click.Path(exists=True, path_type=Path)  # a file, or a folder
OUTPUT = click.Path(dir_okay=False, path_type=Path)

Command = TypeVar("Command", bound=Callable[..., object])


def text_options(command: Command) -> Command:
    """The options that say which texts: what `make_workloads` takes, but for the seed."""
    kinds = click.Choice(["short", "medium", "long", "mixed"])
    options = [
        click.option(
            "--workload", "workloads", multiple=True, type=kinds, help="Kind of texts; may be repeated. [mixed]"
        ),
        click.option("--texts", "texts_file", type=FILE, help="Your own texts instead, one a line."),
        click.option(
            "--num-texts", type=click.IntRange(min=1), default=500, show_default=True, help="Texts per workload."
        ),
    ]
    for option in reversed(options):  # the first is shown first
        command = option(command)
    return command


def make_workloads(names: tuple[str, ...], file: Path | None, num_texts: int, seed: int) -> dict[str, tuple[str, ...]]:
    """The texts of each workload asked for, or those of a file."""
    from sbert_infer.bench.errors import WorkloadError
    from sbert_infer.bench.workloads import make_workload, read_workload

    if file is not None and names:
        raise WorkloadError("--texts takes the place of --workload: give one of them")
    if file is not None:
        return {file.stem: read_workload(file, num_texts)}
    return {name: make_workload(name, num_texts, seed) for name in names or ("mixed",)}


def check_outputs(*files: Path | None) -> None:
    """Before the long run, not after it."""
    from sbert_infer.bench.errors import BenchError

    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise BenchError(f"the folder {file.parent} does not exist")


def write_text(path: Path, content: str) -> None:
    """Write a file, whole or not at all."""
    with staged(path) as file:
        file.path.write_text(content, encoding="utf-8")
        file.commit()


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors of this package and of the system as one line, and exit code 1."""
    try:
        yield
    except SbertInferError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
    except OSError as error:
        click.echo(f"error: {error.filename or ''}: {error.strerror or error}", err=True)
        raise SystemExit(1) from None


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for the time of a run."""
    with tempfile.TemporaryDirectory(prefix="sbert-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(os.path.realpath(folder))


@contextmanager
def progress_line() -> Iterator[Callable[[str], object]]:
    """On a terminal, a line that says what is being done and for how long already."""
    from tqdm import tqdm

    with tqdm(bar_format="{desc}  [{elapsed}]", leave=False, disable=None) as bar:  # None: a terminal only
        yield lambda line: bar.set_description_str(line)
