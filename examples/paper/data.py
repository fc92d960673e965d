"""Data to train and test with: made from scenes, or read from the user's files."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from examples.paper.scenes import CONTRADICTION, ENTAILMENT, Pair, make_nli, make_sts

__all__ = ["Data", "Triplet", "load_data"]

Triplet = tuple[str, str, str]  # a sentence, a similar one, a dissimilar one

TRAINING_SEED, TEST_SEED = 1, 2
TEST_SHARE = 0.2  # of the pairs in a file


@dataclass(frozen=True)
class Data:
    """The data of each objective, and the pairs that all are tested on."""

    labelled: list[Pair]  # for the classification objective; the score is a label
    scored: list[Pair]  # for the regression objective
    triplets: list[Triplet]  # for the triplet objective
    test: list[Pair]


def load_data(nli: Path | None, sts: Path | None, num_pairs: int) -> Data:
    """Load `num_pairs` per objective, from the files if given. No test sentence is trained on."""
    scored, test = _made_sts(num_pairs) if sts is None else _split(_read_sts(sts))
    labelled = make_nli(num_pairs, TRAINING_SEED) if nli is None else _read_nli(nli)
    tested = {text for pair in test for text in pair[:2]}
    scored, labelled = _without(scored, tested), _without(labelled, tested)
    triplets = list(_triplets(labelled))
    random.Random(TRAINING_SEED).shuffle(labelled)  # noqa: S311 - it must be repeatable
    return Data(labelled[:num_pairs], scored[:num_pairs], triplets[:num_pairs], test)


def _made_sts(num_pairs: int) -> tuple[list[Pair], list[Pair]]:
    return make_sts(num_pairs, TRAINING_SEED), make_sts(max(100, num_pairs // 4), TEST_SEED)


def _split(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    random.Random(TRAINING_SEED).shuffle(pairs)  # noqa: S311
    cut = round(TEST_SHARE * len(pairs))
    return pairs[cut:], pairs[:cut]


def _without(pairs: list[Pair], texts: set[str]) -> list[Pair]:
    return [pair for pair in pairs if texts.isdisjoint(pair[:2])]


def _triplets(labelled: Sequence[Pair]) -> Iterator[Triplet]:
    """Yield each premise with an entailment and a contradiction of it."""
    hypotheses: dict[str, dict[float, str]] = {}
    for premise, hypothesis, label in labelled:
        hypotheses.setdefault(premise, {})[label] = hypothesis
    for premise, by_label in hypotheses.items():
        if ENTAILMENT in by_label and CONTRADICTION in by_label:
            yield premise, by_label[ENTAILMENT], by_label[CONTRADICTION]


def _read_sts(path: Path) -> list[Pair]:
    """Read the STS benchmark: genre, file, year, id, score, sentence 1, sentence 2, ..."""
    return [_scored(path, number, row) for number, row in _rows(path)]


def _scored(path: Path, number: int, row: list[str]) -> Pair:
    try:
        return Pair(row[5], row[6], float(row[4]))
    except (IndexError, ValueError):
        raise _wrong(path, number, "as in the STS benchmark: score and sentences in columns 5 to 7") from None


def _read_nli(path: Path) -> list[Pair]:
    """Read a file with a premise, a hypothesis and a label per line."""
    pairs = []
    for number, row in _rows(path):
        if len(row) == 3 and row[2] in ("0", "1", "2"):
            pairs.append(Pair(row[0], row[1], int(row[2])))
        elif number > 1:  # the first may be a header
            raise _wrong(path, number, "premise, hypothesis, and 0 (entailment), 1 (neutral) or 2 (contradiction)")
    if next(_triplets(pairs), None) is None:
        raise click.ClickException(f"{path} has no premise with both an entailment and a contradiction")
    return pairs


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1)


def _wrong(path: Path, number: int, expected: str) -> click.ClickException:
    return click.ClickException(f"{path} line {number} is not {expected}, separated by tabs")
