"""`sbert-embed` from input to output, in this process: vectors, formats, columns, errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from sbert_infer.artifact import exports
from sbert_infer.backends.onnxruntime_cpu import OnnxBackend
from sbert_infer.embed import progress
from sbert_infer.embed.cli import main
from tests.sbert_infer.embed.conftest import WORDS, make_texts

PART = 4096


def run(*args: object, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


def embed(*args: object) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.output


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8", newline="\n")
    return path


def vectors(path: Path, column: str = "embedding") -> Any:
    lists = pq.read_table(path)[column].combine_chunks()
    return lists.flatten().to_numpy().reshape(len(lists), -1)


def test_vectors_are_those_of_encode_to_the_last_bit(tmp_path: Path, small_onnx: Path, encode: Any) -> None:
    texts = make_texts(3 * PART + 100)
    corpus = write_lines(tmp_path / "corpus.txt", texts)
    output = tmp_path / "vectors.parquet"
    summary = embed(corpus, small_onnx, "-o", output, "--part-rows", PART)
    assert vectors(output).tobytes() == encode(texts).tobytes()
    table = pq.read_table(output)
    assert table["row"].to_pylist() == list(range(len(texts)))
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), 32)
    assert pq.read_metadata(output).num_row_groups == 4
    assert "12,388 vectors" in summary
    assert "1 texts were longer" in summary
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt", "vectors.parquet"]


def test_bad_rows_do_not_move_their_neighbours_into_other_batches(
    tmp_path: Path, small_onnx: Path, encode: Any
) -> None:
    texts: list[str | None] = list(make_texts(PART + 500))
    for bad in (0, 17, 4000, PART, PART + 499):
        texts[bad] = None
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    summary = embed(tmp_path / "in.parquet", small_onnx, "-o", tmp_path / "out.parquet", "--part-rows", PART)
    good = [text for text in texts if text is not None]
    assert vectors(tmp_path / "out.parquet").tobytes() == encode(good).tobytes()
    rows = pq.read_table(tmp_path / "out.parquet")["row"].to_pylist()
    assert rows == [row for row, text in enumerate(texts) if text is not None]
    errors = [json.loads(line) for line in (tmp_path / "out.parquet.errors.jsonl").read_text().splitlines()]
    assert [error["row"] for error in errors] == [0, 17, 4000, PART, PART + 499]
    assert {error["reason"] for error in errors} == {"text is null"}
    assert "5 rows without a readable text" in summary


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("suffix", [".parquet", ".npy", ".jsonl"])
def test_every_format_holds_every_precision(
    tmp_path: Path, small_onnx: Path, encode: Any, suffix: str, precision: str
) -> None:
    texts = make_texts(150)
    output = tmp_path / f"vectors{suffix}"
    embed(write_lines(tmp_path / "a.txt", texts), small_onnx, "-o", output, "--precision", precision)
    expected = encode(texts, precision=precision)
    if suffix == ".parquet":
        found = vectors(output)
    elif suffix == ".npy":
        found = np.load(output, mmap_mode="r")
        assert pq.read_table(tmp_path / "vectors.npy.rows.parquet")["row"].to_pylist() == list(range(len(texts)))
    else:
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert [row["row"] for row in rows] == list(range(len(texts)))
        found = np.array([row["embedding"] for row in rows], expected.dtype)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_ranges_of_int8_are_learnt_from_all_parts(tmp_path: Path, small_onnx: Path, encode: Any) -> None:
    texts = make_texts(PART + 10)
    corpus, output = write_lines(tmp_path / "a.txt", texts), tmp_path / "out.parquet"
    embed(corpus, small_onnx, "-o", output, "--part-rows", PART, "--precision", "int8")
    assert vectors(output).tobytes() == encode(texts, precision="int8").tobytes()
    assert pq.read_schema(output).field("embedding").type == pa.list_(pa.int8(), 32)


def test_options_reach_the_engine(tmp_path: Path, small_onnx: Path, encode: Any) -> None:
    texts = make_texts(50)
    corpus = write_lines(tmp_path / "a.txt", texts)
    common = (corpus, small_onnx, "--force", "-o", tmp_path / "out.npy")
    for options, arguments in (
        (("--prompt-name", "query"), {"prompt_name": "query"}),
        (("--prompt", "say: "), {"prompt": "say: "}),
        (("--truncate-dim", 8, "--normalize"), {"truncate_dim": 8, "normalize_embeddings": True}),
    ):
        embed(*common, *options)
        assert np.load(tmp_path / "out.npy").tobytes() == encode(texts, **arguments).tobytes()


def test_columns_are_carried_along_with_their_types(tmp_path: Path, small_onnx: Path) -> None:
    table = pa.table(
        {
            "doc": ["x", "y", "z"],
            "body": ["one", "two", "three"],
            "when": pa.array([1, 2, None], pa.timestamp("ns")),
            "tags": [["a"], [], None],
            "raw": [b"\xff", b"", None],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    output = tmp_path / "out.parquet"
    command = (tmp_path / "in.parquet", small_onnx, "--text-column", "body", "--id-column", "doc", "-o", output)
    embed(*command)
    assert pq.read_table(output).drop_columns(["embedding"]).equals(table.drop_columns(["body"]))
    embed(*command, "--force", "--columns", "body, tags", "--embedding-column", "v")
    assert pq.read_table(output).schema.names == ["doc", "body", "tags", "v"]
    embed(*command, "--force", "--columns", "")
    assert pq.read_table(output).schema.names == ["doc", "embedding"]
    embed(*command[:-1], tmp_path / "out.jsonl")
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert (first["doc"], first["tags"], first["raw"]) == ("x", ["a"], "/w==")


def test_values_without_a_common_type_become_json(tmp_path: Path, small_onnx: Path) -> None:
    years = [1999] * 5000 + ["about 2000", None, {"from": 1}]
    rows = [{"text": f"text {n % 7}", "year": year, "score": n if n % 2 else n / 4} for n, year in enumerate(years)]
    write_lines(tmp_path / "in.jsonl", [json.dumps(row) for row in rows])
    embed(tmp_path / "in.jsonl", small_onnx, "-o", tmp_path / "out.parquet", "--part-rows", PART)
    table = pq.read_table(tmp_path / "out.parquet")
    found = [None if text is None else json.loads(text) for text in table["year"].to_pylist()]
    assert found == years
    assert table["score"].to_pylist() == [row["score"] for row in rows]


def test_several_inputs_are_one_corpus(tmp_path: Path, small_onnx: Path, encode: Any) -> None:
    texts = make_texts(60)
    write_lines(tmp_path / "b.txt", texts[40:])
    write_lines(tmp_path / "a.txt", texts[20:40])
    pq.write_table(pa.table({"text": texts[:20], "n": range(20)}), tmp_path / "z.parquet")
    output = tmp_path / "out.parquet"
    embed(tmp_path / "z.parquet", str(tmp_path / "*.txt"), small_onnx, "-o", output)
    assert vectors(output).tobytes() == encode(texts).tobytes()
    assert pq.read_table(output)["row"].to_pylist() == list(range(60))
    assert pq.read_table(output)["n"].to_pylist() == [*range(20), *[None] * 40]


def test_limit_counts_rows(tmp_path: Path, small_onnx: Path, encode: Any) -> None:
    texts = make_texts(30)
    for name, part in (("a.txt", texts[:10]), ("b.txt", texts[10:])):
        write_lines(tmp_path / name, part)
    embed(tmp_path / "a.txt", tmp_path / "b.txt", small_onnx, "-o", tmp_path / "o.npy", "--limit", 13)
    assert np.load(tmp_path / "o.npy").tobytes() == encode(texts[:13]).tobytes()


def test_nothing_good_gives_an_empty_file(tmp_path: Path, small_onnx: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xff\n\xfe\n")
    embed(tmp_path / "in.txt", small_onnx, "-o", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    assert len(table) == 0
    assert table.schema.names == ["row", "embedding"]
    (tmp_path / "in.txt").write_bytes(b"")
    embed(tmp_path / "in.txt", small_onnx, "-o", tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").shape == (0, 32)


def test_on_error_fail_names_the_first_bad_row(tmp_path: Path, small_onnx: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"good\ncaf\xe9\n")
    result = run(tmp_path / "in.txt", small_onnx, "-o", tmp_path / "out.npy", "--on-error", "fail")
    assert result.exit_code == 1
    assert "in.txt, line 2: not valid UTF-8: byte 0xe9 at 3" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "out.xyz"], "end it in .parquet, .npy or .jsonl"),
        (["-o", "in.jsonl"], "also an input"),
        (["-o", "."], "its name does not say"),
        (["-o", "old.parquet"], "old.parquet exists: choose another name, or replace it with --force"),
        (["-o", "out.parquet", "--text-column", "body"], "no column 'body'; name another with --text-column"),
        (["-o", "out.parquet", "--id-column", "key"], "no column 'key'; name another with --id-column"),
        (["-o", "out.parquet", "--columns", "n,m"], "no column 'm'; see --columns"),
        (["-o", "out.parquet", "--embedding-column", "n"], "has a column 'n'"),
        (["-o", "out.parquet", "--prompt-name", "other"], "has no prompt 'other' (there are: "),
        (["-o", "in.jsonl/out.parquet"], "in.jsonl: File exists"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, small_onnx: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "a", "n": 1}\n')
    Path("old.parquet").touch()
    result = run("in.jsonl", small_onnx, *options)
    assert result.exit_code == 1
    assert message in result.output
    assert result.output.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "old.parquet"]


def test_a_wrong_option_is_exit_code_2(tmp_path: Path, small_onnx: Path) -> None:
    corpus = write_lines(tmp_path / "a.txt", ["a"])
    for options, message in (
        (["--part-rows", "1000"], "must be a multiple of 4096, got 1000"),
        (["--ray-cpus", "1"], "--ray-cpus can't be used without --ray"),
    ):
        result = run(corpus, small_onnx, "-o", tmp_path / "out.npy", *options)
        assert result.exit_code == 2
        assert message in result.output


def test_a_new_folder_is_made(tmp_path: Path, small_onnx: Path) -> None:
    embed(write_lines(tmp_path / "a.txt", ["a"]), small_onnx, "-o", tmp_path / "new" / "er" / "out.npy")
    assert np.load(tmp_path / "new" / "er" / "out.npy").shape == (1, 32)


def test_a_log_gets_a_line_now_and_then(
    tmp_path: Path, small_onnx: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    corpus = write_lines(tmp_path / "a.txt", ["a", "b"])
    main([str(corpus), str(small_onnx), "-o", str(tmp_path / "out.npy")], standalone_mode=False)
    assert "100.0%, 2 texts, " in capsys.readouterr().err
    main([str(corpus), str(small_onnx), "-o", str(tmp_path / "q.npy"), "--quiet"], standalone_mode=False)
    assert capsys.readouterr().err == ""


def test_a_checkpoint_is_exported(
    tmp_path: Path, make_checkpoint: Any, small_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBERT_INFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(exports, "_export", lambda source, file, precision: shutil.copy(small_onnx, file))
    corpus, folder = write_lines(tmp_path / "a.txt", ["a"]), make_checkpoint("bert")
    embed(corpus, folder, "-o", tmp_path / "out.npy", "--model-precision", "int8")
    assert np.load(tmp_path / "out.npy").shape == (1, 32)
    assert [file.suffixes[-2:] for file in (tmp_path / "cache").rglob("*.onnx")] == [[".int8", ".onnx"]]


def test_a_wrong_artifact_is_said_in_one_line(tmp_path: Path, small_onnx: Path) -> None:
    corpus = write_lines(tmp_path / "a.txt", ["a"])
    torn = tmp_path / "torn.onnx"
    torn.write_bytes(small_onnx.read_bytes()[:-9])
    missing = (tmp_path / "none.onnx", "none.onnx: No such file")
    for artifact, message in ((torn, "its end is missing or damaged"), missing):
        result = run(corpus, artifact, "-o", tmp_path / "out.npy")
        assert result.exit_code == 1
        assert message in result.output


def test_a_missing_package_is_named(tmp_path: Path, small_onnx: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from sbert_infer.embed.cli import main; main()"
    args = [sys.executable, "-c", code, str(tmp_path), str(small_onnx), "-o", str(tmp_path / "out.npy")]
    result = subprocess.run(args, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == (
        "error: pyarrow is not installed, sbert-embed needs it: pip install 'sbert-infer[embed]'\n"
    )


def test_help_shows_examples() -> None:
    output = embed("--help")
    assert "sbert-embed corpus.txt model.onnx -o vectors.parquet" in output
    assert "130 after Ctrl-C" in output


@pytest.mark.parametrize("reuse", [False, True])
def test_a_text_without_a_vector_is_named_by_its_row(
    tmp_path: Path, small_onnx: Path, encode: Any, reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, options = make_texts(PART + 9), list[object]()
    texts[PART + 5] = poison = " ".join(WORDS[:9])
    if reuse:
        old = write_lines(tmp_path / "old.txt", [*texts[:PART], texts[PART], texts[PART + 2]])
        embed(old, small_onnx, "-o", tmp_path / "old.parquet", "--columns", "text")
        options = ["--reuse", tmp_path / "old.parquet"]
    corpus = write_lines(tmp_path / "corpus.txt", texts)
    bad, run_model = encode(poison), OnnxBackend.run

    def poisoned(*args: Any, **how: Any) -> Any:
        (found,) = run_model(*args, **how)
        return [np.where(np.abs(found - bad).max(axis=1, keepdims=True) < 1e-4, np.nan, found)]

    monkeypatch.setattr(OnnxBackend, "run", poisoned)
    result = run(corpus, small_onnx, "-o", tmp_path / "vectors.parquet", "--verify", "never", *options)
    assert result.exit_code == 1
    assert f"error: row {PART + 5}, {poison!r:.60}: the model gives NaN or infinity" in result.output
