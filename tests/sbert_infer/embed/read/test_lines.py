"""Reading files: rows come out as they were written, and a bad row never spoils its neighbours."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sbert_infer.embed.read import parts
from sbert_infer.embed.read.columns import to_json
from sbert_infer.embed.read.parts import Part, Position, cut_parts
from sbert_infer.embed.read.rows import Columns
from sbert_infer.embed.read.sources import find_sources
from sbert_infer.errors import EmbedError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)  # all that can be written: no lone surrogates
ROWS = st.lists(st.tuples(TEXT, TEXT), max_size=20)
WINDOW = 4  # texts, instead of thousands


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WINDOW_TEXTS", WINDOW)


anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)


def read(path: Path, columns: Columns = Columns(), start: Position = Position()) -> list[Part]:  # noqa: B008
    return list(cut_parts(find_sources([str(path)], None), columns, WINDOW, start))


def texts_of(read: Sequence[Part]) -> list[str]:
    return [text for part in read for text in part.texts]


def column(read: Sequence[Part], name: str) -> list[Any]:
    return [value for part in read if part.texts for value in part.carried()[name].to_pylist()]


def bad_rows(read: Sequence[Part]) -> list[tuple[int | None, str]]:
    return [(bad.line if bad.line is not None else bad.row, bad.problem.reason) for part in read for bad in part.bad]


def write(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"id": [i for i, _ in rows], "text": [t for _, t in rows]}), path, row_group_size=3)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in rows))
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("id", "text"), *rows])


@anything
@given(rows=ROWS, suffix=st.sampled_from([".csv", ".jsonl", ".parquet"]))
def test_texts_and_ids_come_out_as_they_were_written(rows: list[tuple[str, str]], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows{suffix}"
    write(path, rows)
    found = read(path, Columns(id="id"))
    assert [*zip(column(found, "id"), texts_of(found), strict=True)] == rows
    assert bad_rows(found) == []
    assert [len(part.texts) for part in found[:-1]] == [WINDOW] * (len(rows) // WINDOW)


@anything
@given(lines=st.lists(st.binary(max_size=6).filter(lambda line: b"\n" not in line), max_size=30), data=st.data())
def test_reading_can_go_on_after_any_part(lines: list[bytes], data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    assume(path.read_bytes()[:2] not in (b"\xff\xfe", b"\xfe\xff"))  # UTF-16 is refused
    whole = read(path)
    done = data.draw(st.integers(0, len(whole) - 1))
    rest = read(path, start=whole[done - 1].end if done else Position())
    assert [(part.texts, part.bad, part.end) for part in rest] == [
        (part.texts, part.bad, part.end) for part in whole[done:]
    ]
    assert [*map(str, column(rest, "row"))] == [*map(str, column(whole[done:], "row"))]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
@pytest.mark.parametrize("count", [11, 2 * WINDOW])  # parts that cross the end of a file, and that end with it
def test_reading_goes_on_in_every_format_and_in_the_middle_of_a_row_group(
    tmp_path: Path, suffix: str, count: int
) -> None:
    rows = [(str(n), f"text {n}") for n in range(count)]
    for name in ("a", "b"):
        write(tmp_path / f"{name}{suffix}", rows)
    whole = read(tmp_path)
    assert texts_of(whole) == [text for _, text in rows] * 2
    assert column(whole, "row") == list(range(2 * count))
    for done, part in enumerate(whole[:-1], 1):
        rest = read(tmp_path, start=part.end)
        assert texts_of(rest) == texts_of(whole[done:])
        assert column(rest, "row") == column(whole[done:], "row")
        assert rest[-1].end == whole[-1].end


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,Größe\na,1\n".encode("latin-1"), "a.csv: its header is not valid UTF-8"),
        ("a.txt", "a\nb\n".encode("utf-16"), "a.txt is UTF-16: convert it to UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n' * 2000 + b'{"text": "a", "row": 7}\n', "a column 'row', as the rows' numbers"),
    ],
)
def test_files_that_would_be_misread_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EmbedError, match=message):
        read(tmp_path / name)


def test_rows_read_before_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"a\nb\nc\nd\ne\n")
    end = read(path)[0].end
    for changed in (b"a\nb\nX\nd\ne\n", b"a\nb\n", b""):
        path.write_bytes(changed)
        with pytest.raises(EmbedError, match="its first 4 rows differ from those already embedded"):
            read(path, start=end)


def test_encodings_are_mixed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "mixed.txt"
    latin = "café\n".encode("latin-1")
    path.write_bytes(b"\xef\xbb\xbffirst\r\n" + latin + "café\n\n\u2028x\r\n".encode() + "シ\n".encode("shift-jis"))
    found = read(path)
    assert texts_of(found) == ["first", "café", "", "\u2028x"]
    assert [line for line, _ in bad_rows(found)] == [2, 6]


def test_bad_lines_of_json_are_set_aside_with_their_reasons(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        b'{"id": 1, "text": "good"}',
        b'{"id": 2, "text": null}',
        b'{"id": 3, "text": 5}',
        b'{"id": 4}',
        b'{"id": 5, "text": "torn',
        b'["a", "list"]',
        b'{"id": 7, "text": "\\ud800"}',
        b'{"id": 8, "text": "x", "other": {"deep": "\\udc00"}}',
        b'{"id": 9, "text": "caf\xe9"}',
        b'{"id": null, "text": "no id"}',
        b"",
        b'{"id": 12, "text": "\\ud83d\\ude42"}',
    ]
    path.write_bytes(b"\n".join(lines))
    found = read(path, Columns(id="id"))
    assert texts_of(found) == ["good", "🙂"]
    assert column(found, "id") == [1, 12]
    reasons = dict(bad_rows(found))
    assert list(reasons) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert reasons[2] == "text is null"
    assert reasons[3] == "text is not text but int"
    assert reasons[4] == "there is no text"
    assert reasons[5].startswith("not JSON")
    assert reasons[6] == "not a JSON object but list"
    assert reasons[7] == reasons[8] == "a lone surrogate"
    assert reasons[9].startswith("not valid UTF-8: byte 0xe9")
    assert reasons[10] == "id is null"
    assert [bad.problem.id for part in found for bad in part.bad][:3] == [2, 3, 4]


def test_bad_lines_of_csv_are_set_aside_with_their_reasons(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'id,text\n1,"two\nlines"\n2\n\n3,caf\xe9\n4,"a"b\n5,"say ""hi"""\n6,a,b\n7,"never closed\n8,x\n')
    found = read(path, Columns(id="id"))
    assert texts_of(found) == ["two\nlines", 'say "hi"']
    reasons = dict(bad_rows(found))
    assert list(reasons) == [4, 6, 7, 9, 10]
    assert reasons[4] == "1 fields instead of 2"
    assert reasons[6] == "text is not valid UTF-8"
    assert reasons[7].startswith("not CSV")
    assert reasons[9] == "3 fields instead of 2"
    assert reasons[10].startswith("not CSV")


def test_quotes_mean_nothing_in_tsv_and_columns_may_have_no_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('news\t"It began\nweb\ta "quoted" word\n')
    found = read(path, Columns(text="2", header=False))
    assert texts_of(found) == ['"It began', 'a "quoted" word']
    assert column(found, "1") == ["news", "web"]


def test_strings_in_parquet_need_not_be_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xe9t\xe9", None, "🙂".encode()])
    unchecked = raw.cast(pa.string(), safe=False)
    for texts in (raw, unchecked, unchecked.dictionary_encode()):
        table = pa.table({"text": texts, "note": pa.array([b"a", b"b", b"c", b"\xff"]).cast(pa.string(), safe=False)})
        pq.write_table(table, tmp_path / "rows.parquet")
        found = read(tmp_path / "rows.parquet")
        assert texts_of(found) == ["good"]
        expected = [(1, "text is not valid UTF-8"), (2, "text is null"), (3, "note is not valid UTF-8")]
        assert bad_rows(found) == expected
    assert texts_of(read(tmp_path / "rows.parquet", Columns(carried=()))) == ["good", "🙂"]


def test_a_corrupt_row_group_is_set_aside_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = [f"text number {n}" for n in range(3000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000, compression="zstd", use_dictionary=False)
    group = pq.read_metadata(path).row_group(1).column(0)
    content = bytearray(path.read_bytes())
    middle = group.data_page_offset + group.total_compressed_size // 2
    content[middle : middle + 200] = bytes(200)
    path.write_bytes(content)
    found = list(cut_parts(find_sources([str(path)], None), Columns(), 1000, Position()))
    assert texts_of(found) == texts[:1000] + texts[2000:]
    assert column(found, "row") == [*range(1000), *range(2000, 3000)]
    [bad] = [bad for part in found for bad in part.bad]
    assert (bad.row, bad.problem.rows) == (1000, 1000)
    assert bad.problem.reason.startswith("row group 1 can't be read: ")
    assert found[-1].end.rows == 3000


def test_a_file_that_is_no_parquet_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but torn")
    with pytest.raises(EmbedError, match=r"rows.parquet is not a readable Parquet file"):
        read(tmp_path / "rows.parquet")


def test_a_column_of_numbers_is_not_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "rows.parquet")
    with pytest.raises(EmbedError, match="column 'text' holds int64, not text; see --text-column"):
        read(tmp_path / "rows.parquet")


def test_compressed_files_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    assert texts_of(read(tmp_path / "a.jsonl.gz")) == ["packed"]


def test_nothing_but_bad_rows_stays_in_bounded_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_MANY_BAD", 1000)
    (tmp_path / "a.txt").write_bytes(b"\xff\n" * 5000 + b"good\n")
    found = read(tmp_path / "a.txt")
    assert max(len(part.bad) for part in found) <= 1024
    assert sum(len(part.bad) for part in found) == 5000
    assert texts_of(found) == ["good"]


def test_large_texts_stay_in_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_MANY_CHARACTERS", 10 * WINDOW)
    path = tmp_path / "a.txt"
    path.write_text("a long text\n" * WINDOW + "short\n" * 4 * WINDOW)
    found = list(cut_parts(find_sources([str(path)], None), Columns(), 4 * WINDOW, Position()))
    assert [len(part.texts) for part in found] == [WINDOW, 2 * WINDOW, 2 * WINDOW, 0]
    assert [part.end.rows for part in found] == [WINDOW, 3 * WINDOW, 5 * WINDOW, 5 * WINDOW]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": math.nan, "b": [1.5, math.inf]}, '{"a": null, "b": [1.5, null]}'),
        ({"a": b"ab", "b": 0.1}, '{"a": "YWI=", "b": 0.1}'),
    ],
)
def test_what_json_lacks(value: object, text: str) -> None:
    assert to_json(value) == text


def test_what_can_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.doc").touch()
    (tmp_path / "twice.csv").write_text("a,text,a\n1,2,3\n")
    for name, message in (
        ("missing.txt", "no such file"),
        ("*.tsv", "no such file, and no glob"),
        ("notes.doc", "its name does not say what it holds: use --input-format"),
        ("twice.csv", "the header names 'a' twice"),
    ):
        with pytest.raises(EmbedError, match=message.replace("*", r"\*")):
            read(tmp_path / name)
