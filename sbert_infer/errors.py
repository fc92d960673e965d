"""All errors of this package. Each message is one line that names the cause and says what to do.

    SbertInferError
    ├── CheckpointError      the checkpoint can't be converted; lists every problem at once
    ├── ExportError          the conversion failed or its result may not be written
    │   └── ParityError      the artifact's vectors differ too much from the reference's
    ├── ArtifactError        the file is not an artifact that this version can run
    │   ├── CorruptError     it was one, but its bytes have changed
    │   └── VersionError     it was written by a newer version of sbert-infer
    ├── EmbedError           a corpus can't be read, or its vectors can't be written
    └── EngineError          the engine can't run (closed, used after a fork, missing package)
        ├── TruncationError  a text is longer than the model's limit and on_truncate="error"
        ├── WrongVectorsError  the backend gives other vectors than the eager model did
        ├── TextError        the model fails on this text, and on no other
        ├── CallTooLargeError  one call has more tokens than may be encoded at once
        ├── DeadlineError    the call took longer than its timeout
        └── RetryableError   the same call may succeed later, after `retry_after_s`
            ├── OverloadedError  too much work is queued
            └── WorkerError      the worker that ran the model died or hung

A wrong argument is a plain `TypeError` or `ValueError`, as in the rest of Python.
All warnings have one category, `SbertInferWarning`, so that they can be filtered.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

_SOONEST_RETRY_S = 0.1  # with less, all refused clients would come back at once


class SbertInferError(Exception):
    """Base of all errors of this package. They can be pickled, with their fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[SbertInferError], args: tuple[Any, ...], fields: dict[str, Any]) -> SbertInferError:
    """Make an error again without its constructor, whose arguments are not those of the message."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class CheckpointError(SbertInferError):
    """A checkpoint that can't be converted. `problems` holds every reason, not only the first."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"{source}: {len(self.problems)} {noun}{lines}")


class ExportError(SbertInferError):
    """The conversion failed, or its result may not be written."""


class ParityError(ExportError):
    """The converted model's vectors differ too much from the reference's; nothing was written.

    `worst` holds the texts, or pairs of texts, that differ most, and `excess` says how many times
    as large as allowed the difference is. There are none if the model can't be compared at all.
    """

    def __init__(self, message: str, worst: Iterable[Any] = (), excess: float = math.inf) -> None:
        self.worst, self.excess = tuple(worst), excess
        super().__init__(message)


class ArtifactError(SbertInferError):
    """A file that is not an artifact this version can run."""


class CorruptError(ArtifactError):
    """An artifact whose bytes are not those that were written."""


class VersionError(ArtifactError):
    """An artifact in a format newer than this version of sbert-infer knows."""


class EmbedError(SbertInferError):
    """A corpus that can't be read, or whose vectors can't be written."""


class EngineError(SbertInferError):
    """An engine that can't run."""


class TruncationError(EngineError):
    """A text longer than the model's limit, with `on_truncate="error"`.

    `index` is the position of the text, `limit` is the model's limit in tokens, and `texts` is how
    many texts of the call are known to exceed it.
    """

    def __init__(self, index: int, limit: int, *, noun: str = "text", texts: int = 1) -> None:
        self.index, self.limit, self.texts = index, limit, texts
        super().__init__(f"{noun} {index} has more than {limit} tokens; shorten it or set on_truncate")


class WrongVectorsError(EngineError):
    """A backend that gives other vectors here than the eager model gave at the export."""


class TextError(EngineError):
    """A text on which the model fails, or for which it returns NaN or infinity.

    `index` is the position of the text; `not_finite` says that the model ran, but returned NaN
    or infinity.
    """

    def __init__(self, message: str, index: int, *, not_finite: bool = False) -> None:
        self.index, self.not_finite = index, not_finite
        super().__init__(message)


class CallTooLargeError(EngineError, ValueError):
    """More tokens in one call than may be encoded at once. `limit` is in tokens."""

    def __init__(self, message: str, limit: int) -> None:
        self.limit = limit
        super().__init__(message)


class DeadlineError(EngineError):
    """A call that was not finished within its timeout."""


class RetryableError(EngineError):
    """A call that may succeed if made again, `retry_after_s` seconds later."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = max(_SOONEST_RETRY_S, retry_after_s)
        super().__init__(f"{message}; retry in {self.retry_after_s:.1f} s")


class OverloadedError(RetryableError):
    """A call that was refused at once because too much work is queued."""


class WorkerError(RetryableError):
    """A call that was lost because the worker that ran it died or hung."""


class SbertInferWarning(UserWarning):
    """The category of every warning of this package."""


def warn(message: str) -> None:
    """Issue a warning that points at the line of user code that called into this package."""
    frame, depth = sys._getframe(1), 2  # `warnings` counts this function as level 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__package__")):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, SbertInferWarning, stacklevel=depth)


def _is_ours(package: object) -> bool:
    return isinstance(package, str) and (package == __package__ or package.startswith(f"{__package__}."))
