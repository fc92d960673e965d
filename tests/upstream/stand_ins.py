"""A pytest plugin for the tests of sentence-transformers: its models become our artifacts.

Whatever hub id a test opens, it gets the small model of that kind in the folder that the
environment names: the artifact, or, to see what a test needs of the hub or of real weights, the
checkpoint. Writes the outcome of each test to a file. Runs outside our own package `tests`, since
the tests of sentence-transformers are a package of that name as well.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers

from sbert_infer import Engine, Reranker

FOLDER = Path(os.environ["SBERT_UPSTREAM_FOLDER"])
USE_ENGINES = os.environ["SBERT_UPSTREAM_MODELS"] == "engines"
_outcomes: dict[str, dict[str, Any]] = {}
_touched = False  # whether the test at hand has used an engine


class _Touched:
    """Notes that an engine is used, by any attribute of it."""

    def __getattribute__(self, name: str) -> Any:
        global _touched
        _touched = True
        return super().__getattribute__(name)


class WatchedEngine(_Touched, Engine):
    """An `Engine` that is seen being used."""


class WatchedReranker(_Touched, Reranker):
    """A `Reranker` that is seen being used."""


OPENERS: dict[str, Any] = {
    "SentenceTransformer": WatchedEngine,
    "CrossEncoder": WatchedReranker,
    "SparseEncoder": WatchedEngine,
    "MultiVectorEncoder": WatchedEngine,
}


class _StandIn(type):
    """The class of a stand-in: all but opening models is the original's."""

    original: Any
    opener: Any

    def __call__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
        model = options.pop("model_name_or_path", model)
        if not isinstance(model, str) or Path(model).exists():  # modules, or what the test has saved
            return cls.original(model, *args, **options)
        if USE_ENGINES:
            return cls.opener(FOLDER / f"{cls.__name__}.onnx", *args, **options)
        return cls.original(str(FOLDER / cls.__name__), *args, **options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.original, cls.opener))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


def pytest_configure() -> None:
    """Put the stand-ins into the package before any test imports it."""
    for name, opener in OPENERS.items():
        facts = {"original": getattr(sentence_transformers, name), "opener": opener}
        setattr(sentence_transformers, name, _StandIn(name, (), facts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note the outcome and the error of each test."""
    global _touched
    report = yield
    known = _outcomes.setdefault(item.nodeid, {"outcome": "passed", "error": "", "touched": False})
    known["touched"] |= _touched
    _touched = False
    if report.outcome != "passed":
        known["outcome"] = report.outcome
        known["error"] = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
    return report


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["SBERT_UPSTREAM_OUTCOMES"]).write_text(json.dumps(_outcomes), encoding="utf-8")
