"""Errors of the benchmark.

SbertInferError
└── BenchError
    ├── WorkloadError
    ├── DatasetError
    └── ResultsError
WorkerError
"""

from __future__ import annotations

from sbert_infer.errors import SbertInferError

__all__ = ["BenchError", "DatasetError", "ResultsError", "WorkerError", "WorkloadError"]


class BenchError(SbertInferError):
    """A benchmark that can't be run as asked."""


class WorkloadError(BenchError):
    """Texts that can't be made or read."""


class DatasetError(BenchError):
    """Labelled texts that can't be read."""


class ResultsError(BenchError):
    """A file that does not hold results."""


class WorkerError(Exception):
    """A worker that died or could not do what it was asked.

    It takes a contestant out of the contest, not the benchmark down. `signal` is the number of the
    signal that killed the worker, 0 if none did.
    """

    def __init__(self, message: str, signal: int = 0) -> None:
        super().__init__(message)
        self.signal = signal
