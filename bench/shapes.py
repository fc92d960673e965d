"""`python -m sbert_infer.bench.shapes MODEL`: memory and time over many shapes of batches.

Some runtimes compile for each shape that they see, and keep the latest. This runs every shape that
an `Engine` may make, in a random order, over and over. Each runs twice in a row, cold and then
warm, on all workers at once, since each compiles for itself. The process's memory is printed on the
way.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np

from sbert_infer.artifact import open_artifact
from sbert_infer.backends.base import Backend, Batch
from sbert_infer.backends.select import BackendOptions, open_backend
from sbert_infer.bench.console import plain_errors

_LINES = 5
_STATUS = Path("/proc/self/status")


@click.command()
@click.argument("artifact", type=click.Path(exists=True, path_type=Path))
@click.option("--batches", type=click.IntRange(min=_LINES), default=10_000, help="How many to run. [10000]")
@click.option("--workers", type=click.IntRange(min=1), help="That the model is opened for. [as by an Engine]")
@plain_errors()
def main(artifact: Path, batches: int, workers: int | None) -> None:
    """Run ARTIFACT on batches of many shapes, each on all workers at once."""
    opened = open_artifact(artifact)
    backend = open_backend(opened, BackendOptions("cpu", workers=workers))
    shapes = _shapes(opened.manifest.max_length, backend.max_batch_tokens)
    click.echo(f"{backend.describe()}, {len(shapes):,} shapes: {_memory_mb()} MB")
    cold, warm = [], []
    pool = ThreadPoolExecutor(backend.workers)
    for number, shape in enumerate(itertools.islice(_shuffled(shapes), batches), 1):
        cold.append(_seconds(backend, pool, shape))
        warm.append(_seconds(backend, pool, shape))
        if number % (batches // _LINES) == 0:
            times = f"cold {1e3 * np.median(cold):.2f} ms, warm {1e3 * np.median(warm):.2f} ms"
            click.echo(f"{number:>6,} batches: {_memory_mb()} MB, {times} (medians since the line before)")
            cold, warm = [], []
    pool.shutdown()
    backend.close()


def _shapes(longest: int, most_tokens: int) -> list[tuple[int, int]]:
    """List the shapes, rows and length, of batches of at most `most_tokens` tokens."""
    lengths = range(2, min(longest, most_tokens) + 1)
    return [(rows, length) for length in lengths for rows in range(1, most_tokens // length + 1)]


def _shuffled(shapes: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield all `shapes` in a random order, then in another one, and so on; always the same."""
    shuffle = random.Random(0)  # noqa: S311  # no secret
    while True:
        yield from shuffle.sample(shapes, len(shapes))


def _seconds(backend: Backend, pool: ThreadPoolExecutor, shape: tuple[int, int]) -> float:
    batch = Batch(np.ones(shape, np.int64), np.ones(shape, np.int64))
    start = time.perf_counter()
    list(pool.map(lambda _: backend.run(batch, backend.outputs), range(backend.workers)))  # raises if one fails
    return time.perf_counter() - start


def _memory_mb() -> int:
    """Return the resident memory of this process in MB; 0 where that is unknown."""
    lines = _STATUS.read_text(encoding="ascii").splitlines() if _STATUS.exists() else []
    return next((int(line.split()[1]) // 1000 for line in lines if line.startswith("VmRSS:")), 0)


if __name__ == "__main__":
    main()
