"""Search, mining and clustering with sentence-transformers' utilities, on planted texts."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["semantic_search", "paraphrase_mining", "clustering"]
SCRIPTS = [*NAMES, "duckdb_search", "faiss_search", "qdrant_search", "sqlite_search"]
FILLING = [f"Version {number} of the protocol adds field {number % 7} to the header." for number in range(40)]

Example = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], minilm_onnx: Path) -> Example:
    """`run("clustering", file)` returns what the example prints, with the real MiniLM."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def call(name: str, *arguments: str | Path) -> str:
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        main(str(minilm_onnx), *map(str, arguments))
        return capsys.readouterr().out

    return call


@pytest.fixture
def texts_file(tmp_path: Path) -> Callable[[list[str]], Path]:
    """Write a file with these texts, one per line, a duplicate and empty lines."""

    def write(texts: list[str]) -> Path:
        file = tmp_path / "texts.txt"
        file.write_text("\n\n".join([*texts, texts[0]]), encoding="utf-8")
        return file

    return write


def test_search_finds_the_planted_text(run: Example, texts_file: Callable[[list[str]], Path]) -> None:
    planted = "The surgeon washed her hands before the operation."
    file = texts_file([*FILLING[:20], planted, *FILLING[20:]])
    lines = run("semantic_search", file, "A doctor cleans up ahead of treating a patient.").splitlines()
    assert lines[0].startswith("41 texts encoded in ")
    assert lines[3] == "A doctor cleans up ahead of treating a patient."
    assert lines[4].endswith(f"  {planted}")
    assert len(lines) == 7


def test_mining_finds_the_planted_paraphrase_and_skips_copies(
    run: Example, texts_file: Callable[[list[str]], Path]
) -> None:
    one, other = "The kid fell asleep in the car.", "A child dozed off during the drive."
    lines = run("paraphrase_mining", texts_file([one, *FILLING, other])).splitlines()
    assert lines[0].startswith("861 pairs compared")
    assert [lines[2][6:], lines[3][6:]] == [one, other]
    assert "protocol" not in "".join(lines[2:4])


def test_clustering_finds_the_planted_groups(run: Example, texts_file: Callable[[list[str]], Path]) -> None:
    verbs = ["swims", "dives", "jumps", "sings", "sleeps", "feeds"]
    whale = [f"The whale {verb} near the boat in the ocean." for verb in verbs]
    alone = "Interest rates were raised by the central bank."
    lines = run("clustering", texts_file([*whale, alone, *FILLING])).splitlines()
    assert lines[0].startswith("2 groups hold 46 of 47 texts")
    assert [line for line in lines if line.endswith("texts like")] == ["40 texts like", "6 texts like"]
    assert alone not in "\n".join(lines)


def test_documentation_gives_distinct_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    texts = runpy.run_path(str(EXAMPLES / "documentation.py"))["sentences"](1500)
    assert len(set(texts)) == 1500
    for text in texts:
        assert text[0].isupper(), text
        assert text.endswith("."), text
        assert 5 <= len(text.split()) <= 40, text


@pytest.mark.parametrize("name", NAMES)
def test_every_example_says_how_to_run_it(name: str) -> None:
    usage = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
    assert f"python examples/{name}.py model.onnx" in str(usage)


def test_every_script_has_help() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, "documentation", "texts"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str) -> None:
    script = EXAMPLES / f"{name}.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name} [-h] artifact")
