"""Texts: repeatable, distinct, of the promised lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbert_infer.bench import workloads
from sbert_infer.bench.errors import WorkloadError
from sbert_infer.bench.workloads import WORKLOADS, make_pairs, make_workload, read_workload

LIMITS = {"short": (6, 16), "medium": (30, 60), "long": (150, 400), "mixed": (3, 450)}


@pytest.mark.parametrize("name", WORKLOADS)
def test_texts_are_distinct_repeatable_and_of_the_right_length(name: str) -> None:
    texts = make_workload(name, 300)
    assert texts == make_workload(name, 300)
    assert texts != make_workload(name, 300, seed=1)
    assert len(set(texts)) == 300
    low, high = LIMITS[name]
    assert all(low <= len(text.split()) <= high for text in texts)


def test_mixed_is_mostly_short_with_a_long_tail() -> None:
    words = [len(text.split()) for text in make_workload("mixed", 1000)]
    assert sum(count < 45 for count in words) > 800
    assert 5 < sum(count > 200 for count in words) < 60


def test_more_texts_than_can_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_sentences", lambda: (("Only", "one", "sentence."),))
    with pytest.raises(WorkloadError, match="only 11 distinct texts"):
        make_workload("short", 20)


def test_own_texts_come_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("one\n\n  \ntwo\u2028still two\none\nthree\n", encoding="utf-8")
    assert read_workload(file, 10) == ("one", "two\u2028still two", "three")
    assert read_workload(file, 2) == ("one", "two\u2028still two")


@pytest.mark.parametrize(("content", "message"), [(b"\n \n", "holds no text"), (b"\xff\xfe", "not UTF-8")])
def test_unusable_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    with pytest.raises(WorkloadError, match=message):
        read_workload(file, 10)


def test_each_text_is_paired_with_words_of_another() -> None:
    texts = make_workload("medium", 7)
    pairs = make_pairs(texts)
    assert [document for _, document in pairs] == list(texts)
    for query, document in pairs:
        assert len(query.split()) == 8
        assert not document.startswith(query)
