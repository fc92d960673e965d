"""Texts to measure with: made from Python's own documentation, or read from a file."""

from __future__ import annotations

import functools
import importlib
import inspect
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sbert_infer.bench.errors import WorkloadError

# Modules with much prose in their docstrings and no side effects on import.
_MODULES = """
argparse ast collections concurrent.futures configparser contextlib csv datetime decimal difflib doctest email.message
enum fractions functools http.client inspect json logging optparse pathlib pickle random shutil socket statistics string
subprocess tarfile tempfile textwrap threading unittest unittest.mock urllib.parse urllib.request uuid zipfile
"""
_PROSE_WORD = re.compile(r"[A-Za-z][a-z'-]*[.,;:!?]*")
_MARKUP = re.compile(r":\w+:`|[`*|\\()\[\]\"]|^\s*>>>.*$", re.MULTILINE)
_LONGEST_WORD = 25  # characters; anything longer is a ruler or a path
_QUERY_WORDS = 8
_ATTEMPTS = 50  # random draws per text before giving up on finding one that is new


def _mixed(rng: random.Random) -> int:
    """Lengths of mostly sentences, some paragraphs, and a few pages beyond the usual limits."""
    kind = rng.random()
    if kind < 0.88:
        return round(min(max(rng.lognormvariate(2.6, 0.6), 3), 60))  # median 13 words
    return rng.randint(60, 180) if kind < 0.97 else rng.randint(220, 450)


# Name -> how many words the next text has.
WORKLOADS: dict[str, Callable[[random.Random], int]] = {
    "short": lambda rng: rng.randint(6, 16),
    "medium": lambda rng: rng.randint(30, 60),
    "long": lambda rng: rng.randint(150, 400),
    "mixed": _mixed,
}


def make_workload(name: str, num_texts: int, seed: int = 0) -> tuple[str, ...]:
    """Make distinct texts of one kind, repeatable for the same arguments and Python version."""
    rng = random.Random(f"{name} {seed}")  # noqa: S311 - it must be repeatable
    sentences = _sentences()
    texts: dict[str, None] = {}
    for _ in range(_ATTEMPTS * num_texts):
        if len(texts) == num_texts:
            break
        texts[_text(sentences, rng.randrange(len(sentences)), WORKLOADS[name](rng))] = None
    if len(texts) < num_texts:
        raise WorkloadError(f"only {len(texts)} distinct texts could be made for '{name}', {num_texts} were asked for")
    return tuple(texts)


def read_workload(path: Path, num_texts: int) -> tuple[str, ...]:
    """Read the first `num_texts` distinct, non-empty lines of a file."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines also splits at characters of a text
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    texts = tuple(dict.fromkeys(line for line in lines if line.strip()))[:num_texts]
    if not texts:
        raise WorkloadError(f"{path} holds no text")
    return texts


def make_pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Pair each text with a query: the first words of the text half the list away."""
    queries = [" ".join(text.split()[:_QUERY_WORDS]) for text in texts]
    return [(queries[(place + len(texts) // 2) % len(texts)], text) for place, text in enumerate(texts)]


def _text(sentences: tuple[tuple[str, ...], ...], start: int, words: int) -> str:
    """Join `words` words, starting with a sentence."""
    taken: list[str] = []
    while len(taken) < words:
        taken += sentences[start % len(sentences)]
        start += 1
    return " ".join(taken[:words])


@functools.cache
def _sentences() -> tuple[tuple[str, ...], ...]:
    """Every sentence of prose in the documentation, once, as words."""
    found: dict[tuple[str, ...], None] = {}
    for document in _documents():
        for paragraph in re.split(r"\n\s*\n", _MARKUP.sub("", document)):
            for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
                words = tuple(sentence.split())
                prose = sum(_PROSE_WORD.fullmatch(word) is not None for word in words)
                if len(words) >= 4 and prose >= 0.8 * len(words) and max(map(len, words)) <= _LONGEST_WORD:
                    found[words] = None
    return tuple(found)


def _documents() -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        yield from (topics[name] for name in sorted(topics))
    except ImportError:  # some distributions leave it out; the docstrings remain
        pass
    for name in _MODULES.split():
        module = importlib.import_module(name)
        yield module.__doc__ or ""
        for _, member in sorted(vars(module).items()):
            if getattr(member, "__module__", None) == name:
                yield inspect.getdoc(member) or ""
                inner = vars(member) if inspect.isclass(member) else {}
                yield from (inspect.getdoc(part) or "" for _, part in sorted(inner.items()) if callable(part))
