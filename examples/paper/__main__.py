"""`python -m examples.paper`: the Sentence-BERT paper's experiments, scaled down and exported."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from tqdm import tqdm

Say = Callable[[str], object]

SPEED = "speed"
MODELS = [
    f"{objective}-{pooling}" for objective in ("softmax", "cosine", "triplet") for pooling in ("cls", "mean", "max")
]
PARTS = (*MODELS, SPEED)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FOLDER = click.Path(file_okay=False, path_type=Path)
ONLY = "'speed', or a model such as softmax-cls, cosine-mean, triplet-max; repeatable. [all]"
EPILOG = """\b
Examples:
  python -m examples.paper                                     # texts found on every machine
  python -m examples.paper --nli snli.tsv --sts sts-dev.csv    # your own
  python -m examples.paper --only speed --sentences 2000
"""


@click.command(epilog=EPILOG)
@click.option("--nli", type=FILE, help="Premise, hypothesis and label (0, 1, 2), separated by tabs. [made]")
@click.option("--sts", type=FILE, help="Scored pairs in the format of the STS benchmark; a fifth is the test. [made]")
@click.option("--base", help="BERT to start from: a folder or hub id. [all-MiniLM-L6-v2]")
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Number of its layers to train.")
@click.option("--pairs", type=click.IntRange(16), default=640, show_default=True, help="Pairs to train each model on.")
@click.option(
    "--sentences",
    type=click.IntRange(2),
    default=10_000,
    show_default=True,
    help="Sentences among which to find the most similar two.",
)
@click.option(
    "--sample",
    type=click.IntRange(2),
    default=500,
    show_default=True,
    help="Texts and pairs to time the slow methods with.",
)
@click.option("--only", multiple=True, type=click.Choice(PARTS), metavar="PART", help=ONLY)
@click.option("--output", type=NEW_FOLDER, help="Keep checkpoints and artifacts in this new folder.")
def main(
    nli: Path | None,
    sts: Path | None,
    base: str | None,
    layers: int,
    pairs: int,
    sentences: int,
    sample: int,
    only: tuple[str, ...],
    output: Path | None,
) -> None:
    """Train the Sentence-BERT paper's models, scaled down, export them, and compare speeds."""
    parts = only or PARTS
    with _folder(output) as folder, _progress() as say:
        say("loading libraries")
        _quieten()
        from examples.paper.models import default_base

        base = base or default_base()
        if models := [part for part in parts if part != SPEED]:
            _quality(base, layers, models, nli, sts, pairs, folder, say)
        if SPEED in parts:
            _speed(base, sentences, min(sample, sentences), folder, say)


def _quality(
    base: str, layers: int, models: list[str], nli: Path | None, sts: Path | None, pairs: int, folder: Path, say: Say
) -> None:
    from examples.paper.data import load_data
    from examples.paper.quality import HEADER, measure_quality, row

    data = load_data(nli, sts, pairs)
    tqdm.write(f"## Trained on {pairs} pairs or triplets, tested on {len(data.test)} other pairs\n\n{HEADER}")
    for quality in measure_quality(base, layers, models, data, folder, say):
        tqdm.write(row(quality))


def _speed(base: str, num_sentences: int, num_sample: int, folder: Path, say: Say) -> None:
    from examples.documentation import sentences
    from examples.paper.speed import HEADER, measure_speed, row

    say("reading sentences")
    texts = sentences(num_sentences)
    speed = measure_speed(base, texts, num_sample, num_sample, folder, say)
    rows = "\n".join(row(timings) for timings in speed.rows)
    tqdm.write(f"\n## The most similar two of {len(texts):,} sentences\n\n{HEADER}\n{rows}")
    if speed.best is not None:
        left, right, score = speed.best
        tqdm.write(f"\n{score:.4f}  {texts[left]}\n        {texts[right]}")


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """Make a folder, kept only if the user named it."""
    if output is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        try:
            output.mkdir(parents=True)
        except FileExistsError:
            raise click.BadParameter(f"{output} exists: name a new folder", param_hint="--output") from None
        yield output


@contextmanager
def _progress() -> Iterator[Say]:
    """On a terminal, show a line with the current step and the time so far."""
    with tqdm(bar_format="{desc}  [{elapsed}]", leave=False, disable=None) as bar:  # None: a terminal only
        yield bar.set_description_str


def _quieten() -> None:
    """Silence warnings about layers left out and new heads, which are intended here."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)


if __name__ == "__main__":
    main(prog_name="python -m examples.paper")
