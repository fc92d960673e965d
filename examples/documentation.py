"""Texts found on every machine: sentences of the documentation in the Python installation."""

from __future__ import annotations

import ast
import itertools
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

__all__ = ["read_texts", "sentences"]

PROSE_WORD = re.compile(r"[A-Za-z][a-z'-]*[.,;:!?]*")
SENTENCE = re.compile(r"[A-Z][^_/=<>\[\]{}]*\.", re.DOTALL)  # from a capital letter to a full stop, without code
MARKUP = re.compile(r":\w+:(?=`)|[`*|\\]")
SKIPPED = {"idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}


def read_texts(path: str | None, num_texts: int) -> list[str]:
    """Read the first distinct lines of a file, or sentences of documentation without one."""
    if path is None:
        return sentences(num_texts)
    lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").split("\n"))
    return list(itertools.islice(dict.fromkeys(filter(None, lines)), num_texts))


def sentences(num_texts: int) -> list[str]:
    """Find prose in the standard library, then in installed packages.

    No two sentences differ only in case.
    """
    found: dict[str, str] = {}
    for document in _documents():
        for sentence in _prose(document):
            found.setdefault(sentence.lower(), sentence)
        if len(found) >= num_texts:
            break
    return list(found.values())[:num_texts]


def _prose(document: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", document):
        for sentence in re.split(r"(?<=[.!?])\s+", MARKUP.sub("", paragraph)):
            words = sentence.split()
            prose = sum(PROSE_WORD.fullmatch(word) is not None for word in words)
            if 5 <= len(words) <= 40 and prose >= 0.8 * len(words) and SENTENCE.fullmatch(sentence.strip()):
                yield " ".join(words)


def _documents() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics

        yield from topics.values()
    except ImportError:  # some distributions leave it out; the docstrings remain
        pass
    for root in (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))):
        for file in sorted(root.rglob("*.py")):
            if SKIPPED.isdisjoint(file.relative_to(root).parts):
                yield from _docstrings(file)


def _docstrings(file: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other people's code
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates, and files that are broken on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
