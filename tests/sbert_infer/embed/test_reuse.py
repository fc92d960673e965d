"""Vectors of earlier outputs, used again: which, with which bits, and what is refused."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbert_infer.artifact import open_artifact
from sbert_infer.artifact.fingerprint import PARTS, Fingerprint, fingerprint
from sbert_infer.embed.reuse import EarlierOutput, KnownVectors
from sbert_infer.embed.write.origin import ORIGIN, Origin
from sbert_infer.embed.write.vectors import fixed_lists
from tests.sbert_infer.embed.conftest import make_texts
from tests.sbert_infer.embed.test_local import PART, embed, run, vectors, write_lines


def make_origin(**changes: Any) -> Origin:
    values = {"prompt": "", "dim": 3, "normalize": False, "precision": "float32"}
    parts = Fingerprint(dict.fromkeys(PARTS, "0"))
    return Origin(parts, **{**values, "text_column": "text", "embedding_column": "v", **changes})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.text(max_size=3), max_size=40), max_size=3), st.lists(st.text(max_size=3), max_size=40))
def test_the_first_vector_of_a_known_text_is_found(old: list[list[str]], new: list[str]) -> None:
    """Whatever the texts, however often they are there, and in however many files."""
    counter = itertools.count()
    expected: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        outputs = []
        for number, texts in enumerate(old):
            rows = [[next(counter), 0, len(text)] for text in texts]
            for text, row in zip(texts, rows, strict=True):
                expected.setdefault(text, row)
            lists = fixed_lists(np.array(rows, np.float32).reshape(-1, 3))
            path = Path(name) / f"{number}.parquet"
            pq.write_table(pa.table({"text": pa.array(texts, pa.string()), "v": lists}), path)
            outputs.append(EarlierOutput(path, path, make_origin()))
        missing, found = KnownVectors.build(Path(name), outputs, 3).find(new)
    assert missing.tolist() == [index for index, text in enumerate(new) if text not in expected]
    for index, text in enumerate(new):
        if text in expected:
            assert found[index].tolist() == expected[text]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [f"{text} {number}" for number, text in enumerate(make_texts(PART + 300))]


@pytest.fixture(scope="module")
def old(texts: list[str], small_onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output that keeps its texts."""
    folder = tmp_path_factory.mktemp("old")
    corpus, output = write_lines(folder / "corpus.txt", texts), folder / "old.parquet"
    embed(corpus, small_onnx, "-o", output, "--columns", "text", "--part-rows", PART)
    return output


def changed(texts: list[str]) -> tuple[list[str], list[int]]:
    """The same texts in another order, some of them new, and the indices of the new ones."""
    texts = [*texts[100:], *texts[:100]]
    new = list(range(5, len(texts), 90))
    for index in new:
        texts[index] += " once more"
    return texts, new


def test_known_texts_keep_their_bits_and_others_run_part_by_part(
    tmp_path: Path, small_onnx: Path, encode: Any, texts: list[str], old: Path
) -> None:
    now, new = changed(texts)
    corpus, output = write_lines(tmp_path / "now.txt", now), tmp_path / "now.parquet"
    summary = embed(corpus, small_onnx, "-o", output, "--reuse", old, "--part-rows", PART)
    assert f"{len(now) - len(new):,} texts have the vectors of earlier outputs" in summary
    assert f"embedded   {len(new)} texts" in summary
    before = dict(zip(texts, vectors(old), strict=True))
    found = vectors(output)
    for index, text in enumerate(now):
        if index not in new:
            assert found[index].tobytes() == before[text].tobytes()
    for part in ([i for i in new if i < PART], [i for i in new if i >= PART]):
        assert found[part].tobytes() == encode([now[i] for i in part]).tobytes()
    np.testing.assert_allclose(found, encode(now), atol=1e-5, rtol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["now.txt", "now.parquet"]


def test_nothing_new_gives_the_same_file(tmp_path: Path, small_onnx: Path, texts: list[str], old: Path) -> None:
    corpus, output = write_lines(tmp_path / "same.txt", texts), tmp_path / "same.parquet"
    embed(corpus, small_onnx, "-o", output, "--reuse", old, "--part-rows", PART, "--columns", "text")
    assert output.read_bytes() == old.read_bytes()


def test_every_kind_of_earlier_output_and_of_precision(
    tmp_path: Path, small_onnx: Path, encode: Any, texts: list[str]
) -> None:
    some, folder = texts[:200], tmp_path / "folder"
    folder.mkdir()
    keep = (small_onnx, "--columns", "text", "-o")
    embed(write_lines(tmp_path / "a.txt", some[:80]), *keep, folder / "a.parquet")
    embed(write_lines(tmp_path / "b.txt", some[80:150]), *keep, folder / "b.npy")
    embed(write_lines(tmp_path / "c.txt", some[150:]), *keep, tmp_path / "c.npy")
    corpus = write_lines(tmp_path / "all.txt", some)
    for number, (precision, reused) in enumerate([("float32", 200), ("int8", 200), ("ubinary", 200)]):
        output = tmp_path / f"{number}.npy"
        reuse = ("--reuse", folder, "--reuse", tmp_path / "c.npy")
        assert f"reused     {reused} texts" in embed(corpus, small_onnx, "-o", output, *reuse, "--precision", precision)
        expected = encode(some, precision=precision)
        if precision == "float32":
            np.testing.assert_allclose(np.load(output), expected, atol=1e-5, rtol=0)
        else:
            assert np.mean(np.load(output) == expected) > 0.999  # a last bit may cross an edge


def test_a_column_with_rows_that_are_no_texts_is_understood(tmp_path: Path, small_onnx: Path) -> None:
    corpus = tmp_path / "in.jsonl"
    corpus.write_text('{"text": "one"}\n{"text": 7}\n{"text": "\\"one\\""}\n')
    embed(corpus, small_onnx, "-o", tmp_path / "old.parquet", "--columns", "text")
    summary = embed(corpus, small_onnx, "-o", tmp_path / "new.parquet", "--reuse", tmp_path / "old.parquet")
    assert "reused     2 texts" in summary
    assert vectors(tmp_path / "new.parquet").tobytes() == vectors(tmp_path / "old.parquet").tobytes()


def test_killed_and_run_again_the_result_is_the_same(
    tmp_path: Path, small_onnx: Path, texts: list[str], old: Path
) -> None:
    now = [text if index % 50 else f"{text} new" for index, text in enumerate(texts * 4)]
    corpus = write_lines(tmp_path / "now.txt", now)
    options = ["--reuse", old, "--part-rows", PART]
    embed(corpus, small_onnx, "-o", tmp_path / "whole.parquet", *options)
    output, parts = tmp_path / "out.parquet", tmp_path / "out.parquet.parts"
    args = [str(each) for each in (corpus, small_onnx, "-o", output, *options)]
    for count in (1, 3):
        process = subprocess.Popen([sys.executable, "-m", "sbert_infer.embed.cli", *args])
        while len(list(parts.glob("*.arrow"))) < count and process.poll() is None:
            time.sleep(0.001)
        process.kill()
        process.wait()
    embed(*args, *(["--force"] if output.exists() else []))
    assert output.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not parts.exists()


def test_the_output_says_from_what_its_vectors_are(tmp_path: Path, small_onnx: Path) -> None:
    expected = fingerprint(open_artifact(small_onnx))
    corpus = write_lines(tmp_path / "in.txt", ["one", "two"])
    for suffix in ("parquet", "npy", "jsonl"):
        embed(corpus, small_onnx, "-o", tmp_path / f"out.{suffix}", "--prompt-name", "query", "--truncate-dim", "8")
    written = [pq.read_schema(tmp_path / name).metadata[ORIGIN] for name in ("out.parquet", "out.npy.rows.parquet")]
    for text in (*written, (tmp_path / "out.jsonl.origin.json").read_bytes()):
        origin = Origin.from_json(text)
        assert origin == Origin(expected, "find this: ", 8, False, "float32", "text", "embedding")


@pytest.mark.parametrize(
    ("made_with", "options", "message"),
    [
        ([], [], "it holds no texts to compare with: --columns text,... keeps them"),
        (["--columns", "text", "--normalize"], [], "its vectors are others: --normalize differ"),
        (["--columns", "text"], ["--prompt-name", "query"], "its vectors are others: --prompt differ"),
        (["--columns", "text"], ["--truncate-dim", "8"], "its vectors are others: --truncate-dim differ"),
        (["--columns", "text", "--precision", "int8"], [], "its vectors are int8: only those of float32"),
    ],
)
def test_other_vectors_are_refused(
    tmp_path: Path, small_onnx: Path, made_with: list[str], options: list[str], message: str
) -> None:
    corpus = write_lines(tmp_path / "in.txt", [f"text {n}" for n in range(120)])
    embed(corpus, small_onnx, "-o", tmp_path / "old.parquet", *made_with)
    result = run(corpus, small_onnx, "-o", tmp_path / "new.npy", "--reuse", tmp_path / "old.parquet", *options)
    assert (result.exit_code, message in result.output) == (1, True), result.output
    assert not (tmp_path / "new.npy.parts").exists()


@pytest.mark.parametrize("damage", [lambda vectors: vectors[:-1], lambda vectors: vectors.astype(np.float64)])
def test_vectors_that_do_not_belong_to_their_rows_are_refused(
    tmp_path: Path, small_onnx: Path, damage: Callable[[Any], Any]
) -> None:
    corpus, old = write_lines(tmp_path / "in.txt", ["one", "two"]), tmp_path / "old.npy"
    embed(corpus, small_onnx, "-o", old, "--columns", "text")
    np.save(old, damage(np.load(old)))
    result = run(corpus, small_onnx, "-o", tmp_path / "out.parquet", "--reuse", old)
    assert (result.exit_code, "it is not what old.npy.rows.parquet belongs to" in result.output) == (1, True)


def test_an_empty_file_of_vectors_is_refused(tmp_path: Path, small_onnx: Path) -> None:
    corpus, old = write_lines(tmp_path / "in.txt", ["one", "two"]), tmp_path / "old.npy"
    embed(corpus, small_onnx, "-o", old, "--columns", "text")
    old.write_bytes(b"")
    result = run(corpus, small_onnx, "-o", tmp_path / "out.parquet", "--reuse", old)
    assert (result.exit_code, f"--reuse {old}: " in result.output) == (1, True), result.output


def test_files_that_are_no_earlier_output_are_refused(tmp_path: Path, small_onnx: Path) -> None:
    corpus = write_lines(tmp_path / "in.txt", ["one"])
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "other.parquet")
    for arguments, message in (
        (("--reuse", tmp_path / "none.parquet"), "none.parquet: no such file or folder"),
        (("--reuse", corpus), "--reuse reads Parquet and .npy"),
        (("--reuse", tmp_path / "other.parquet"), "it does not say from what its vectors are"),
    ):
        result = run(corpus, small_onnx, "-o", tmp_path / "out.parquet", *arguments)
        assert (result.exit_code, message in result.output) == (1, True), result.output
    output = tmp_path / "out.parquet"
    result = run(corpus, small_onnx, "-o", output, "--reuse", tmp_path / "other.parquet", "--ray=auto")
    assert (result.exit_code, "--reuse can't be used with --ray" in result.output) == (2, True)
    embed(corpus, small_onnx, "-o", output, "--columns", "text")
    result = run(corpus, small_onnx, "-o", output, "--reuse", output, "--force")
    assert "is also an output to --reuse" in result.output


def test_vectors_of_another_model_are_refused_by_the_part_that_differs(
    tmp_path: Path, small_onnx: Path, export_checkpoint: Callable[..., Path]
) -> None:
    corpus = write_lines(tmp_path / "in.txt", ["one", "two"])
    other = export_checkpoint("bert", prompts={"query": "seek that: "}, include_prompt=False, normalize=False)
    embed(corpus, other, "-o", tmp_path / "old.parquet", "--columns", "text")
    result = run(corpus, small_onnx, "-o", tmp_path / "new.npy", "--reuse", tmp_path / "old.parquet")
    both = [fingerprint(open_artifact(path)).exact for path in (other, small_onnx)]
    assert f"the model's prompts differ (fingerprint {both[0]}, now {both[1]})" in result.output
    shutil.copy(other, tmp_path / "model.onnx")
    unfinished = tmp_path / "unfinished.npy"
    command = ("-", str(tmp_path / "model.onnx"), "-o", str(unfinished), "--part-rows", str(PART))
    process = subprocess.Popen([sys.executable, "-m", "sbert_infer.embed.cli", *command], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"one\n" * (2 * PART + 1))
    process.stdin.flush()
    while not (tmp_path / "unfinished.npy.parts" / "000000.arrow").exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    shutil.copy(small_onnx, tmp_path / "model.onnx")
    result = run(*command, stdin=b"one\n" * (2 * PART + 1))
    assert result.exit_code == 1
    assert "the artifact has changed" in result.output
    assert "its prompts differ" in result.output
