"""Errors reach other processes with their fields."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import sbert_infer
from sbert_infer import SbertInferError

ERRORS = [
    sbert_infer.TruncationError(3, 256, noun="pair", texts=2),
    sbert_infer.TextError("text 1: the model fails", 1, not_finite=True),
    sbert_infer.CallTooLargeError("too many", 100),
    sbert_infer.OverloadedError("the queue is full", 1.5),
    sbert_infer.WorkerError("it died", 0.0),
    sbert_infer.DeadlineError("too late"),
    sbert_infer.CheckpointError("model/", ["no config.json", "no weights"]),
    sbert_infer.ParityError("they differ"),
    sbert_infer.CorruptError("damaged"),
    sbert_infer.VersionError("newer"),
    sbert_infer.EmbedError("no such column"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickle(error: SbertInferError) -> None:
    again: Any = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_all_that_have_fields_are_here() -> None:
    public = [getattr(sbert_infer, name) for name in sbert_infer.__all__]
    errors = {kind for kind in public if isinstance(kind, type) and issubclass(kind, SbertInferError)}
    assert {kind for kind in errors if "__init__" in vars(kind)} <= {
        base for error in ERRORS for base in type(error).__mro__
    }
