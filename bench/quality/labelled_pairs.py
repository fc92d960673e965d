"""Pairs of texts with human scores (similarity) or labels of 0 or 1 (paraphrases, duplicates)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbert_infer.bench.errors import DatasetError
from sbert_infer.bench.quality.dataset_files import Record, is_table, read_records

# Column names of the two texts, and of their score or label, in common datasets.
_TEXTS = (
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("sentence_a", "sentence_b"),
    ("sent1", "sent2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("#1 string", "#2 string"),
)
_SCORES = ("score", "similarity_score", "similarity", "relatedness_score", "label", "labels")
_LABELS = ("label", "labels", "is_duplicate", "quality", "score")
_STS_BENCHMARK = ["genre", "file", "year", "id", "score", "sentence1", "sentence2"]
_SPLITS = ("test", "dev", "validation", "train")  # file names that say nothing about the dataset


@dataclass(frozen=True)
class LabelledPairs:
    """A dataset: two texts and a score or label per pair."""

    name: str
    left: list[str]
    right: list[str]
    values: list[float]


def read_scores(path: Path) -> LabelledPairs:
    """Read scored pairs: a file, a folder with a `test` file, or a folder of SentEval."""
    if path.is_dir() and (inputs := sorted(path.glob("STS.input.*.txt"))):
        return _collect(path, path.name, _sent_eval(inputs), ("score",))
    file = _test_file(path) if path.is_dir() else path
    pairs = _collect(file, _name(file), read_records(file, _headless), _SCORES)
    if len(pairs.values) < 2:
        raise DatasetError(f"{file} holds {len(pairs.values)} pairs: a correlation needs two or more")
    return pairs


def read_labels(path: Path) -> LabelledPairs:
    """Read pairs labelled 0 or 1, which must both occur: a file, or a folder with a `test` file."""
    file = _test_file(path) if path.is_dir() else path
    pairs = _collect(file, _name(file), read_records(file, _headless), _LABELS)
    for number, label in enumerate(pairs.values, 1):
        if label not in (0, 1):
            raise DatasetError(f"{file} pair {number}: the label must be 0 or 1, got {label:g}")
    if len(set(pairs.values)) < 2:
        raise DatasetError(f"{file} must hold pairs with label 0 and pairs with label 1")
    return pairs


def _collect(path: Path, name: str, records: Iterator[Record], values: Sequence[str]) -> LabelledPairs:
    rows = _test_rows(list(records))
    if not rows:
        raise DatasetError(f"{path} holds no pairs")
    columns = _columns(path, rows[0], values)
    pairs = LabelledPairs(name, [], [], [])
    number = 0
    for row in rows:
        cells: list[Any] = [row.get(column) for column in columns]
        together = _unzipped(path, cells) if all(isinstance(cell, list) for cell in cells) else [cells]
        for left, right, value in together:  # some of mteb's files have all texts in one row
            number += 1
            for text in (left, right):
                if not isinstance(text, str):
                    raise DatasetError(f"{path} pair {number}: a text must be a string, got {text!r:.60}")
            if not _is_number(value):
                raise DatasetError(f"{path} pair {number}: the score or label must be a number, got {value!r:.60}")
            pairs.left.append(left)
            pairs.right.append(right)
            pairs.values.append(float(value))
    return pairs


def _unzipped(path: Path, cells: Sequence[Any]) -> list[Any]:
    sizes = {len(cell) for cell in cells}
    if len(sizes) > 1:
        raise DatasetError(f"{path}: a row has lists of {' and '.join(map(str, sorted(sizes)))} entries")
    return list(zip(*cells, strict=True))


def _test_rows(rows: list[Record]) -> list[Record]:
    """Keep the test part of a file that has several, in a column `split`."""
    parts = {row.get("split") for row in rows}
    return [row for row in rows if row.get("split") == "test"] if len(parts) > 1 and "test" in parts else rows


def _columns(path: Path, row: Record, values: Sequence[str]) -> tuple[str, str, str]:
    texts = next((names for names in _TEXTS if row.keys() >= set(names)), None)
    value = next((name for name in values if name in row), None)
    if texts is None or value is None:
        found = ", ".join(repr(name)[:30] for name in list(row)[:10])
        wanted = f"sentence1, sentence2 and {values[0]}"
        raise DatasetError(f"{path} needs columns such as {wanted}; it has {found}")
    return (*texts, value)


def _headless(first: list[str]) -> list[str] | None:
    """Columns of a file without a header: the STS benchmark's, or two texts and a number."""
    if len(first) >= len(_STS_BENCHMARK) and _is_number(first[4]):
        return _STS_BENCHMARK
    return ["sentence1", "sentence2", "score"] if len(first) == 3 and _is_number(first[2]) else None


def _sent_eval(inputs: Sequence[Path]) -> Iterator[Record]:
    """Read texts and scores from two files, line by line, skipping lines without a score."""
    for file in inputs:
        gold = file.with_name(file.name.replace("STS.input.", "STS.gs."))
        lines, scores = (one.read_text(encoding="utf-8").removesuffix("\n").split("\n") for one in (file, gold))
        if len(lines) != len(scores):
            raise DatasetError(f"{file} has {len(lines)} lines, {gold.name} {len(scores)}")
        for number, (line, score) in enumerate(zip(lines, scores, strict=True), 1):
            texts = line.split("\t")
            if len(texts) < 2:
                raise DatasetError(f"{file} line {number} is not two texts with a tab between them: {line!r:.60}")
            if score.strip():
                yield {"sentence1": texts[0], "sentence2": texts[1], "score": score}


def _test_file(folder: Path) -> Path:
    found = [file for file in sorted([*folder.glob("test*"), *folder.glob("data/test*")]) if is_table(file)]
    if len(found) != 1:
        what = f"{len(found)} files named test*" if found else "no file named test*"
        raise DatasetError(f"{folder} has {what}: name the file")
    return found[0]


def _name(path: Path) -> str:
    stem = path.name.partition(".")[0]
    folder = path.absolute().parent
    folder = folder.parent if folder.name == "data" else folder
    return folder.name if re.split("[-_]", stem)[0] in _SPLITS and folder.name else stem


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
