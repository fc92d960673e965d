"""A pytest plugin for the tests of sentence-transformers: its models become our artifacts.

Whatever hub id a test opens, it gets a model of that kind, written by `models.py`: the artifact,
or, to see what a test needs of the hub or of real weights, the checkpoint. No test may take longer
than a limit. The outcome of each test is a line of a file, written when it ends. Runs outside our
own package `tests`, since the tests of sentence-transformers are a package of that name as well.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers

from sbert_infer import Engine, Reranker

SETTINGS = json.loads(Path(os.environ["SBERT_UPSTREAM_SETTINGS"]).read_text(encoding="utf-8"))
FOLDER = Path(SETTINGS["folder"])
# By class: a pattern of hub ids, and the model that takes their place.
STAND_INS = {
    "SentenceTransformer": ((r"all-MiniLM-L6-v2", "minilm"), (r"static", "static"), (r"base", "wide"), (r"", "dense")),
    "CrossEncoder": ((r"/nli-", "labels"), (r"", "reranker")),
    "SparseEncoder": ((r"inference-free", "routes"), (r"splade", "splade"), (r"", "csr")),
    "MultiVectorEncoder": ((r"", "multi"),),
}
_outcome: dict[str, Any] = {}  # of the test at hand
_touched = False  # whether it has used an engine


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


class _StandIn(type):
    """The class of a stand-in: all but opening models is the original's."""

    original: Any

    def __call__(cls, model_name_or_path: Any = None, **options: Any) -> Any:
        model = model_name_or_path
        if not isinstance(model, str) or Path(model).exists():  # modules, or what the test has saved
            return cls.original(model, **options)
        name = next(name for pattern, name in STAND_INS[cls.original.__name__] if re.search(pattern, model))
        if not SETTINGS["engines"]:
            return cls.original(str(FOLDER / name), **options)
        global _touched
        _touched = True
        opener = WatchedReranker if cls.original.__name__ == "CrossEncoder" else WatchedEngine
        return opener(model_name_or_path=FOLDER / f"{name}.onnx", **options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (cls.original, WatchedEngine, WatchedReranker))

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another package than that of the checkout."""
    if not Path(sentence_transformers.__file__).is_relative_to(config.rootpath):
        raise pytest.UsageError(f"{sentence_transformers.__file__} is not the package of {config.rootpath}")


# As early as this, since conftest.py imports the classes.
for _name in STAND_INS:
    setattr(sentence_transformers, _name, _StandIn(_name, (), {"original": getattr(sentence_transformers, _name)}))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep only the tests that are asked for."""
    if SETTINGS["only"] is not None:
        only = set(SETTINGS["only"])
        items[:] = [item for item in items if item.nodeid in only]


@contextmanager
def _limited() -> Iterator[None]:
    """Let whatever runs in here fail when it takes too long."""

    def stop(*_: object) -> None:
        pytest.fail(f"longer than {SETTINGS['limit_s']} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SETTINGS["limit_s"])
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Limit the time that fixtures take."""
    with _limited():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Limit the time that a test takes."""
    with _limited():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Note the outcome and the error of each test."""
    global _touched
    report = yield
    if call.when == "setup":
        _outcome.update(test=item.nodeid, outcome="passed", error="", where="", touched=False)
    _outcome["touched"] |= _touched
    _touched = False
    if report.outcome != "passed":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        where = "" if call.excinfo is None else str(call.excinfo.traceback[-1])
        _outcome.update(outcome=report.outcome, error=error, where=where)
    if call.when == "teardown":
        with Path(SETTINGS["outcomes"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_outcome) + "\n")
    return report
