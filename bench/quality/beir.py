"""Retrieval data in BEIR's layout: `corpus.jsonl`, `queries.jsonl`, `qrels/test.tsv`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbert_infer.bench.errors import DatasetError
from sbert_infer.bench.quality.dataset_files import Record, is_table, read_records

__all__ = ["Retrieval", "read_beir"]

Grades = dict[str, dict[str, int]]  # query id -> document id -> how relevant it is


@dataclass(frozen=True)
class Retrieval:
    """Queries with judged documents. The corpus stays on disk."""

    name: str
    queries: dict[str, str]
    grades: Grades
    corpus: Path

    def documents(self) -> Iterator[tuple[str, str]]:
        """Read id and text of each document: its title, a space, and its text."""
        for record in read_records(self.corpus):
            title, text = (record.get(name) or "" for name in ("title", "text"))
            yield _id(self.corpus, record), f"{title} {text}".strip()


def read_beir(path: Path) -> Retrieval:
    """Read a folder's `test` part, or the part that a file names, as `scifact/qrels/dev.tsv`."""
    folder = path if path.is_dir() else path.absolute().parent.parent
    qrels = path if path.is_file() else _qrels(folder)
    grades = _grades(qrels)
    file = _table(folder, "queries")
    texts = {_id(file, record): str(record.get("text") or "") for record in read_records(file)}
    if missing := [query for query in grades if query not in texts]:
        raise DatasetError(
            f"{qrels} judges {len(missing)} queries that {file.name} does not have, such as {missing[0]}"
        )
    part = qrels.name.partition(".")[0]
    name = folder.absolute().name + ("" if part == "test" else f" {part}")
    data = Retrieval(name, {query: texts[query] for query in grades}, grades, _table(folder, "corpus"))
    if next(data.documents(), None) is None:
        raise DatasetError(f"{data.corpus} holds no documents")
    return data


def _qrels(folder: Path) -> Path:
    try:
        return _table(folder / "qrels", "test")
    except DatasetError:
        others = ", ".join(str(file) for file in sorted((folder / "qrels").glob("*")) if is_table(file))
        if others:
            raise DatasetError(
                f"{folder} has no qrels/test.tsv: name the part instead of the folder ({others})"
            ) from None
        raise


def _table(folder: Path, name: str) -> Path:
    found = [file for file in sorted(folder.glob(f"{name}.*")) if is_table(file)]
    if not found:
        raise DatasetError(
            f"{folder} has no {name}.jsonl or the like: a BEIR folder has corpus.jsonl, queries.jsonl, qrels/test.tsv"
        )
    return found[0]


def _grades(path: Path) -> Grades:
    grades: Grades = {}
    for number, record in enumerate(read_records(path, _headless), 1):
        query, document = (record.get(f"{name}-id", record.get(f"{name}_id")) for name in ("query", "corpus"))
        try:
            grades.setdefault(str(query), {})[str(document)] = int(record["score"])
        except (KeyError, TypeError, ValueError):
            query = None
        if query is None or document is None:
            raise DatasetError(f"{path} row {number} is not query-id, corpus-id and a whole score: {record!r:.80}")
    if not grades:
        raise DatasetError(f"{path} judges no document")
    return grades


def _headless(first: list[str]) -> list[str] | None:
    return ["query-id", "corpus-id", "score"] if len(first) == 3 and first[2].lstrip("-").isdecimal() else None


def _id(path: Path, record: Record) -> str:
    value: Any = record.get("_id", record.get("id"))
    if value is None:
        raise DatasetError(f"{path} has a row without _id: {record!r:.60}")
    return str(value)
