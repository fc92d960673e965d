"""`python -m sbert_infer.bench.shapes MODEL`: memory and time over many shapes of batches.

Some runtimes compile for each shape that they see. This runs each shape twice in a row, new and
then known, and prints the process's memory on the way.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from sbert_infer.artifact import open_artifact
from sbert_infer.backends.base import Backend, Batch
from sbert_infer.backends.select import BackendOptions, open_backend

_LINES = 5
_STATUS = Path("/proc/self/status")


@click.command()
@click.argument("artifact", type=click.Path(exists=True, path_type=Path))
@click.option("--shapes", type=click.IntRange(min=_LINES), default=10_000, help="Different shapes to run. [10000]")
def main(artifact: Path, shapes: int) -> None:
    """Run ARTIFACT on many shapes of batches, the smallest first, with one worker."""
    opened = open_artifact(artifact)
    backend = open_backend(opened, BackendOptions("cpu", workers=1))
    click.echo(f"{backend.describe()}: {_memory_mb()} MB")
    new, known = [], []
    for number, shape in enumerate(itertools.islice(_shapes(opened.manifest.max_length), shapes), 1):
        new.append(_seconds(backend, shape))
        known.append(_seconds(backend, shape))
        if number % (shapes // _LINES) == 0:
            times = f"new {1e3 * np.median(new):.2f} ms, known {1e3 * np.median(known):.2f} ms"
            click.echo(f"{number:>6} shapes: {_memory_mb()} MB, {times} (medians since the line before)")
            new, known = [], []
    backend.close()


def _shapes(longest: int) -> Iterator[tuple[int, int]]:
    """Yield different shapes, rows and length, by their number of tokens."""
    for tokens in itertools.count(2):
        for length in range(2, min(tokens, longest) + 1):
            if tokens % length == 0:
                yield tokens // length, length


def _seconds(backend: Backend, shape: tuple[int, int]) -> float:
    batch = Batch(np.ones(shape, np.int64), np.ones(shape, np.int64))
    start = time.perf_counter()
    backend.run(batch, backend.outputs)
    return time.perf_counter() - start


def _memory_mb() -> int:
    """Return the resident memory of this process in MB; 0 where that is unknown."""
    lines = _STATUS.read_text(encoding="ascii").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) // 1000 for line in lines if line.startswith("VmRSS:")), 0)


if __name__ == "__main__":
    main()
