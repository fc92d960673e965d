"""One `AsyncEngine.encode` on its way through the queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import DeadlineError, TextError
from .output import finish
from .scheduler import Request
from .sparse import SparseRows
from .texts import OnTruncate
from .tokenizer import TokenizedTexts

__all__ = ["CLOSED", "Call", "CallOptions", "Encoded", "succeed", "within"]

Indices = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Result = TypeVar("Result")

CLOSED = "the engine was closed during this call"


@dataclass(frozen=True)
class Encoded:
    """What a call gives: the vectors, and what they were made of."""

    vectors: Any  # an array [texts, dim], or [dim] for one text; of a sparse encoder, `SparseRows`
    tokens: int  # of all texts, prompts and special ones included, after truncation
    truncated: int  # texts that were cut to the model's limit


@dataclass(frozen=True)
class CallOptions:
    """What a caller asks for."""

    prompt: str
    dim: int
    normalize: bool
    on_truncate: OnTruncate
    deadline: float


class Call(Request):
    """A request with its tokens, the vectors so far, and the future that somebody awaits. For use by any thread."""

    def __init__(
        self,
        tokenized: TokenizedTexts,
        inverse: Indices | None,  # the row of each text, where identical texts share one
        options: CallOptions,
        *,
        arrival: float,
        prompt_length: int,
        rows: Any,  # to put the vectors into: an array [texts, dim], or `SparseRows`
    ) -> None:
        super().__init__(tokenized.lengths, arrival=arrival, deadline=options.deadline, prompt_length=prompt_length)
        self.tokenized = tokenized
        self._inverse, self._options = inverse, options
        self._vectors = rows
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def store(self, rows: Indices, vectors: Vectors) -> None:
        """Keep the vectors of some texts."""
        self._vectors[rows] = vectors

    def result(self) -> tuple[Any, Exception | None]:
        """What was asked for, made of the vectors, which are all there."""
        try:
            vectors = self._vectors if self._inverse is None else self._vectors[self._inverse]
            if isinstance(vectors, SparseRows):
                return vectors, None
            return finish(vectors, self._options.dim, self._options.normalize), None
        except Exception as error:  # whatever it is, somebody waits
            return None, error

    def blame(self, row: int, reason: str) -> None:
        """The text of this row can't be encoded."""
        text = row if self._inverse is None else int(np.flatnonzero(self._inverse == row)[0])
        self.fail(TextError(f"text {text}: {reason}"))

    def fail(self, error: Exception) -> None:
        """Let the caller have an error instead of vectors."""
        _settle([(self.future, None, error)])


def succeed(calls: Iterable[Call]) -> None:
    """Let the callers have their vectors."""
    _settle([(call.future, *call.result()) for call in calls])


Outcome = tuple["asyncio.Future[Any]", Any, Exception | None]


def _settle(outcomes: list[Outcome]) -> None:
    """From any thread, and once for all of them: waking an event loop is a system call."""
    if outcomes:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            outcomes[0][0].get_loop().call_soon_threadsafe(_set, outcomes)


def _set(outcomes: list[Outcome]) -> None:
    for future, vectors, error in outcomes:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        elif vectors is not None:
            future.set_result(vectors)


async def within(future: asyncio.Future[Result], deadline: float) -> Result:
    """Wait for `future` until `deadline`, on the monotonic clock. As `asyncio.wait_for`, at a fifth of its cost."""
    if deadline == math.inf:
        return await future
    late = False

    def expire() -> None:
        nonlocal late
        late = future.cancel()

    timer = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), expire)
    try:
        return await future
    except asyncio.CancelledError:
        if not late:
            raise
        raise DeadlineError("the call was not done in time: raise timeout_s, or send fewer texts at once") from None
    finally:
        timer.cancel()
