"""Labelled texts, in the layouts of common datasets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.bench.errors import DatasetError
from sbert_infer.bench.quality.beir import read_beir
from sbert_infer.bench.quality.labelled_pairs import LabelledPairs, read_labels, read_scores
from tests.bench.conftest import write_beir

ROWS = [('A "cat", sat.', "A feline.", 4.5), ("Rain", "A spoon\u2028fell", 0.0)]
LEFT, RIGHT, SCORES = (list(column) for column in zip(*ROWS, strict=True))
JSON = "".join(json.dumps({"sentence1": a, "sentence2": b, "score": score}) + "\n" for a, b, score in ROWS)

LAYOUTS = {
    "sts-test.csv": "".join(f"g\tf\t2012\t1\t{score}\t{a}\t{b}\n" for a, b, score in ROWS),  # the benchmark's own
    "more.tsv": "".join(f"g\tf\t2012\t1\t{score}\t{a}\t{b}\tmore\n" for a, b, score in ROWS),
    "glue.tsv": "index\tsentence1\tsentence2\tscore\r\n" + "".join(f"1\t{a}\t{b}\t{s}\r\n" for a, b, s in ROWS),
    "parts.tsv": "split\tscore\tsentence1\tsentence2\n"
    + "".join(f"test\t{score}\t{a}\t{b}\n" for a, b, score in ROWS)
    + "train\t1\tnot\tthis\n",
    "plain.tsv": "".join(f"{a}\t{b}\t{score}\n" for a, b, score in ROWS),
    "sick.txt": "pair_ID\tsentence_A\tsentence_B\trelatedness_score\n"
    + "".join(f"1\t{a}\t{b}\t{s}\n" for a, b, s in ROWS),
    "comma.csv": 'sentence1,sentence2,score\n"A ""cat"", sat.",A feline.,4.5\nRain,A spoon\u2028fell,0\n',
    "marked.csv": '\ufeffscore,sentence1,sentence2\n4.5,"A ""cat"", sat.",A feline.\n0,Rain,A spoon\u2028fell\n',
    "mteb.jsonl": JSON,
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_scores_are_read_from_every_layout(tmp_path: Path, name: str, packed: bool) -> None:
    content = LAYOUTS[name].encode()
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(gzip.compress(content) if packed else content)
    assert read_scores(file) == LabelledPairs(name.partition(".")[0], LEFT, RIGHT, SCORES)


def test_a_folder_stands_for_its_test_file(tmp_path: Path) -> None:
    folder = tmp_path / "sts12-sts"
    folder.mkdir()
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(JSON.encode()))
    (folder / "train.jsonl.gz").write_bytes(b"")
    assert read_scores(folder) == LabelledPairs("sts12-sts", LEFT, RIGHT, SCORES)


def test_texts_and_scores_in_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "STS12-en-test"
    folder.mkdir()
    (folder / "STS.input.a.txt").write_text(f"{LEFT[0]}\t{RIGHT[0]}\nleft\tout\n", encoding="utf-8")
    (folder / "STS.gs.a.txt").write_text("4.5\n\n", encoding="utf-8")
    (folder / "STS.input.b.txt").write_text(f"{LEFT[1]}\t{RIGHT[1]}\n", encoding="utf-8")
    (folder / "STS.gs.b.txt").write_text("0\n", encoding="utf-8")
    assert read_scores(folder) == LabelledPairs("STS12-en-test", LEFT, RIGHT, SCORES)


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"sentence1": LEFT, "sentence2": RIGHT, "score": SCORES})
    (tmp_path / "data").mkdir()
    parquet.write_table(table, tmp_path / "data" / "test-00000-of-00001.parquet")
    assert read_scores(tmp_path) == LabelledPairs(tmp_path.name, LEFT, RIGHT, SCORES)


@pytest.mark.parametrize(
    "content",
    [
        "id,question1,question2,is_duplicate\n1,a,b,1\n2,c,d,0\n",
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\ta\tb\n0\t3\t4\tc\td\n",
        "sentence1,sentence2,label\na,b,1.0\nc,d,0.0\n",
        "premise\thypothesis\tlabel\na\tb\t1\nc\td\t0\n",
        "a\tb\t1\nc\td\t0\n",
    ],
)
def test_labels_are_found_by_the_names_people_use(tmp_path: Path, content: str) -> None:
    file = tmp_path / "quora.csv"
    file.write_text(content, encoding="utf-8")
    assert read_labels(file) == LabelledPairs("quora", ["a", "c"], ["b", "d"], [1.0, 0.0])


def test_all_pairs_in_one_row(tmp_path: Path) -> None:
    file = tmp_path / "sprint.jsonl"
    file.write_text(json.dumps({"sent1": ["a", "c"], "sent2": ["b", "d"], "labels": [1, 0]}), encoding="utf-8")
    assert read_labels(file) == LabelledPairs("sprint", ["a", "c"], ["b", "d"], [1.0, 0.0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "left\tright\tvalue\nx\ty\t1\n", "needs columns such as sentence1, sentence2 and label"),
        ("a.tsv", "sentence1\tsentence2\tlabel\nx\ty\n", "row 2 has 2 columns instead of 3"),
        ("a.tsv", "sentence1\tsentence2\tlabel\nx\ty\tyes\n", "pair 1: the score or label must be a number, got 'yes'"),
        ("a.tsv", "sentence1\tsentence2\tlabel\nx\ty\tnan\n", "must be a number"),
        ("a.tsv", "sentence1\tsentence2\tlabel\nx\ty\t2\n", "must be 0 or 1, got 2"),
        ("a.tsv", "sentence1\tsentence2\tlabel\nx\ty\t1\n", "label 0 and pairs with label 1"),
        ("a.jsonl", '{"sentence1": 3, "sentence2": "", "label": 1}\n', "a text must be a string, got 3"),
        ("a.jsonl", "[1]\n", "not a JSON object"),
        ("a.jsonl", "{\n", "line 1 is not JSON"),
        ("a.tsv", "", "a.tsv"),
        ("a.tsv.gz", "not gzip", "not a whole gzip file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises(DatasetError, match=message):
        read_labels(file)


@given(st.binary(max_size=60), st.sampled_from(["a.tsv", "a.csv", "a.jsonl", "a.tsv.gz"]))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str) -> None:
    file = tmp_path_factory.mktemp("bytes", numbered=True) / name
    file.write_bytes(content)
    with pytest.raises(DatasetError):
        read_labels(file)


def rewrite_qrels(folder: Path, qrels: str) -> Path:
    (folder / "qrels" / "test.tsv").write_text(qrels, encoding="utf-8")
    return folder


def test_a_beir_folder_is_read(tmp_path: Path) -> None:
    folder = rewrite_qrels(
        write_beir(tmp_path / "tiny", queries=3), "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td7\t0\n"
    )
    documents = [{"_id": "d1", "title": "Cats", "text": "sit."}, {"_id": "d2", "text": "Rain "}]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    data = read_beir(folder)
    assert (data.name, list(data.queries), data.grades) == ("tiny", ["q1"], {"q1": {"d1": 2, "d7": 0}})
    assert list(data.documents()) == [("d1", "Cats sit."), ("d2", "Rain")]


def test_another_part_is_named_by_its_file(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "tiny")
    (folder / "qrels" / "test.tsv").rename(folder / "qrels" / "dev.tsv")
    assert read_beir(folder / "qrels" / "dev.tsv").name == "tiny dev"
    with pytest.raises(DatasetError, match=r"no qrels/test.tsv: name the part .*dev\.tsv"):
        read_beir(folder)


@pytest.mark.parametrize(
    ("qrels", "message"),
    [
        ("query-id\tcorpus-id\tscore\nq9\td1\t1\n", "judges 1 queries that queries.jsonl does not have, such as q9"),
        ("query-id\tcorpus-id\tscore\nq1\td1\tgood\n", "row 1 is not query-id, corpus-id and a whole score"),
        ("query-id\tcorpus-id\tscore\n", "judges no document"),
    ],
)
def test_bad_judgements_are_refused(tmp_path: Path, qrels: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_beir(rewrite_qrels(write_beir(tmp_path / "tiny"), qrels))
