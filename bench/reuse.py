"""`python -m sbert_infer.bench.reuse MODEL`: what `sbert-embed --reuse` saves.

Embeds a corpus of which 1 % has changed, from scratch and with the vectors of before, in turns, and
compares the outputs. Times are those of whole processes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np

from sbert_infer.bench.console import plain_errors
from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.workloads import make_workload

_EVERY, _KINDS = 100, 1000  # one text in so many changes; so many get numbers, to be all texts


@click.command()
@click.argument("model")
@click.option("--rows", type=click.IntRange(min=1), default=100_000, show_default=True, help="Texts of the corpus.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="How often each runs.")
@plain_errors()
def main(model: str, rows: int, rounds: int) -> None:
    """Embed a corpus with MODEL, change 1 % of it, and embed it again with and without --reuse."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        old, new = (_write_corpus(folder / f"{when}.txt", rows, when) for when in ("before", "after"))
        earlier, outputs = folder / "earlier.npy", [folder / f"{number}.npy" for number in range(2)]
        _embed(old, model, earlier)
        ways = {"from scratch": (), "--reuse": ("--reuse", str(earlier))}
        took: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in sorted(ways, reverse=number % 2 == 1):
                seconds, memory_mb = _embed(new, model, outputs[way == "--reuse"], *ways[way])
                took[way].append(seconds)
                click.echo(f"{way:<12} {seconds:8.2f} s, {memory_mb:,.0f} MB at most")
            click.echo(f"outputs differ by {_largest_difference(*outputs):.1e} at most")
        ratios = [slow / fast for slow, fast in zip(*took.values(), strict=True)]
        click.echo(f"--reuse is {median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})")


def _write_corpus(path: Path, rows: int, when: str) -> Path:
    """Write a corpus of distinct texts, of which every hundredth depends on `when`."""
    kinds = make_workload("short", _KINDS)
    texts = [f"{kinds[row % _KINDS]} {row}{'' if row % _EVERY else ' ' + when}" for row in range(rows)]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def _embed(corpus: Path, model: str, output: Path, *options: str) -> tuple[float, float]:
    """Run `sbert-embed`; return its seconds, and the most memory that it took, in MB."""
    command = [sys.executable, "-m", "sbert_infer.embed.cli", str(corpus), model, "-o", str(output), *options]
    start = time.perf_counter()
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [*command, "--columns", "text", "--force", "-q"])  # noqa: S606
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise BenchError(f"sbert-embed ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - start, usage.ru_maxrss / 1e3  # in kB, on Linux


def _largest_difference(one: Path, other: Path) -> float:
    """Return how far vectors differ; raise if anything else does."""
    rows = [path.with_name(f"{path.name}.rows.parquet").read_bytes() for path in (one, other)]
    if rows[0] != rows[1]:
        raise BenchError("the outputs have different rows")
    return float(np.abs(np.load(one) - np.load(other)).max())


if __name__ == "__main__":
    main()
