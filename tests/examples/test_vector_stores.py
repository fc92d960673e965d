"""Each example as a user runs it, with the real MiniLM and the real store."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sbert_infer import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLE = runpy.run_path(str(EXAMPLES / "texts.py"))
TEXTS: list[str] = SAMPLE["TEXTS"]
QUESTIONS: list[str] = SAMPLE["QUESTIONS"]
ANSWERS = ["Leaves catch sunlight", "The Moon's gravity", "An index lets a database", "Diversify: do not put"]


def run(*arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected(minilm_onnx: Path) -> str:
    """What an exact search finds, as the examples print it."""
    with Engine(minilm_onnx) as engine:
        scores = engine.encode(QUESTIONS) @ engine.encode(TEXTS).T
    blocks = []
    for question, row in zip(QUESTIONS, scores, strict=True):
        hits = [f"  {row[index]:.2f}  {TEXTS[index]}\n" for index in np.argsort(-row)[:3]]
        blocks.append(f"\n{question}\n{''.join(hits)}")
    return "".join(blocks)


@pytest.mark.parametrize("store", ["faiss", "qdrant", "sqlite"])
def test_a_store_finds_what_an_exact_search_finds(store: str, minilm_onnx: Path, expected: str) -> None:
    assert run(EXAMPLES / f"{store}_search.py", minilm_onnx) == expected


def test_duckdb_searches_the_file_that_sbert_embed_writes(minilm_onnx: Path, expected: str, tmp_path: Path) -> None:
    corpus, vectors = tmp_path / "corpus.txt", tmp_path / "vectors.parquet"
    corpus.write_text("\n".join(TEXTS), encoding="utf-8")
    run("-m", "sbert_infer.embed.cli", corpus, minilm_onnx, "--columns", "text", "-o", vectors)
    assert run(EXAMPLES / "duckdb_search.py", minilm_onnx, vectors) == expected


def test_every_question_has_its_answer_first(expected: str) -> None:
    first = [block.splitlines()[1] for block in expected.strip().split("\n\n")]
    assert [answer for answer, line in zip(ANSWERS, first, strict=True) if answer not in line] == []


def test_every_example_is_listed_and_says_how_to_run_it() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = sorted(EXAMPLES.glob("*_search.py"))
    assert len(scripts) == 5
    for script in scripts:
        assert f"({script.name})" in listed
        usage = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
        assert f"python examples/{script.name} model.onnx" in str(usage)
