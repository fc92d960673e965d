"""What documents say about the repository is true."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

import pytest
import yaml

import sbert_infer
from tests.repository.sources import ROOT

MOST_CHARACTERS = 100  # in a line of prose
PATH = re.compile(r"\b(?:sbert_infer|export|kernels|bench|examples|tests|docs)/[\w/-]+\.(?:py|md|txt)\b")


def documents() -> dict[str, str]:
    """Path -> text of every document."""
    folders = [ROOT / "docs", ROOT / "kernels"]
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in folder.rglob("*.md"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def long_lines(document: str) -> Iterator[str]:
    """Lines of prose that are too long. Code, tables and headings can't be wrapped."""
    is_code = False
    for line in document.splitlines():
        is_code ^= line.lstrip().startswith("```")
        if len(line) > MOST_CHARACTERS and not is_code and not line.startswith(("|", "#", "    ")):
            yield line


def test_documents_wrap() -> None:
    assert len(documents()) > 30
    long = {path for path, text in documents().items() if any(long_lines(text))}
    assert long == set()


def resolve(name: str) -> object:
    """Resolve a dotted name of the architecture page, which leaves out `sbert_infer.`."""
    parts = name.split(".")
    found: object = sbert_infer
    for at, part in enumerate(parts):
        if not hasattr(found, part):
            importlib.import_module(".".join(["sbert_infer", *parts[: at + 1]]))
        found = getattr(found, part)
    return found


def test_the_hops_of_the_architecture_exist() -> None:
    text = documents()["docs/architecture.md"]
    names = set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", text)) - set(re.findall(r"`([\w.]+\.(?:py|md))`", text))
    assert len(names) > 30
    assert {"encode.pipeline.Pipeline.run", "export.exporter.export", "serve.wire.problems"} <= names
    for name in sorted(names):
        assert resolve(name) is not None
    with pytest.raises((ImportError, AttributeError)):
        resolve("encode.pipeline.Pipeline.walk")


def test_files_named_in_documents_exist() -> None:
    named = {(path, found) for path, text in documents().items() for found in PATH.findall(text)}
    assert ("CONTRIBUTING.md", "tests/repository/test_order.py") in named
    assert sorted(f"{path}: {found}" for path, found in named if not (ROOT / found).exists()) == []


@pytest.mark.parametrize("line", ["a " * 51, "- " + "a " * 51, "  " + "a " * 51])
def test_long_lines_are_found(line: str) -> None:
    assert list(long_lines(f"short\n{line}\n```\n{line}\n```\n| {line} |\n# {line}\n")) == [line]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def make_commands(document: str) -> set[str]:
    """The targets that a document shows as code: `make test`, or at the start of a line."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return set(re.findall(r"(?:^\$? ?|`)make (?:[A-Z]+=\S+ )?([a-z-]+)", text, re.MULTILINE))


def test_documented_make_targets_exist() -> None:
    assert make_commands("CONTRIBUTING.md") >= {"test", "lint", "format", "demo"}
    assert make_commands("README.md") | make_commands("CONTRIBUTING.md") <= make_targets()


def test_make_targets_are_phony() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == make_targets()


def test_every_document_is_a_page_of_the_site() -> None:
    site = yaml.safe_load((ROOT / "docs_site" / "mkdocs.yml").read_text(encoding="utf-8"))
    groups = [group for entry in site["nav"] for group in entry.values()]
    inside = [page for group in groups if isinstance(group, list) for entry in group for page in entry.values()]
    shown = {*inside, *(group for group in groups if isinstance(group, str))}
    documents = {file.name for file in (ROOT / "docs").glob("*.md")}
    assert documents - shown == set(), "add it to the nav of docs_site/mkdocs.yml"
    others = {"index.md", "contributing.md", "changelog.md", "examples.md", "api.md", "adr/README.md"}
    assert shown - documents == others


def test_libraries_are_shown_in_the_versions_they_are_tested_in() -> None:
    pins = re.findall(
        r"^([\w-]+)==(\S+)$", (ROOT / "tests" / "libraries.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = re.findall(r"^\| ([\w-]+) \| (\d\S+) \|", documents()["docs/libraries.md"], re.MULTILINE)
    assert len(shown) == 13
    assert set(shown) - set(pins) == set()


def test_changelog_names_the_next_version_first() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## \[Unreleased\]\n\nNext version: (\S+)$", changelog, re.MULTILINE)
    assert first is not None
    assert first[1] == sbert_infer.__version__
    assert first.start() == changelog.index("\n## ") + 1


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    files = sorted(file.name for file in folder.glob("[0-9]*.md"))
    assert files
    assert files == sorted(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", index))
