"""One `AsyncEngine.encode` on its way through the queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from .errors import DeadlineError, TextError
from .output import finish
from .scheduler import Request
from .tokenizer import TokenizedTexts

__all__ = ["CLOSED", "Call", "CallOptions", "Encoded", "within"]

Indices = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]
Result = TypeVar("Result")

CLOSED = "the engine was closed during this call"


@dataclass(frozen=True)
class Encoded:
    """What a call gives: the vectors, and what they were made of."""

    vectors: Vectors  # [texts, dim], or [dim] for one text
    tokens: int  # of all texts, prompts and special ones included, after truncation
    truncated: int  # texts that were cut to the model's limit


@dataclass(frozen=True)
class CallOptions:
    """What a caller asks for."""

    prompt: str
    dim: int
    normalize: bool
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
        dim: int,  # of the model
    ) -> None:
        super().__init__(tokenized.lengths, arrival=arrival, deadline=options.deadline, prompt_length=prompt_length)
        self.tokenized = tokenized
        self._inverse, self._options = inverse, options
        self._vectors = np.empty((len(tokenized.lengths), dim), np.float32)
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Vectors] = self._loop.create_future()

    def store(self, rows: Indices, vectors: Vectors) -> None:
        """Keep the vectors of some texts."""
        self._vectors[rows] = vectors

    def succeed(self) -> None:
        """All vectors are there: make of them what was asked for."""
        try:
            vectors = self._vectors if self._inverse is None else self._vectors[self._inverse]
            self._settle(finish(vectors, self._options.dim, self._options.normalize), None)
        except Exception as error:  # whatever it is, somebody waits
            self.fail(error)

    def blame(self, row: int, reason: str) -> None:
        """The text of this row can't be encoded."""
        text = row if self._inverse is None else int(np.flatnonzero(self._inverse == row)[0])
        self.fail(TextError(f"text {text}: {reason}"))

    def fail(self, error: Exception) -> None:
        """Let the caller have an error instead of vectors."""
        self._settle(None, error)

    def _settle(self, vectors: Vectors | None, error: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # its event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(_settle, self.future, vectors, error)


async def within(future: asyncio.Future[Result], deadline: float) -> Result:
    """Wait for `future` until `deadline`, on the monotonic clock."""
    try:
        return await asyncio.wait_for(future, None if deadline == math.inf else deadline - time.monotonic())
    except asyncio.TimeoutError:
        raise DeadlineError("the call was not done in time: raise timeout_s, or send fewer texts at once") from None


def _settle(future: asyncio.Future[Vectors], vectors: Vectors | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif vectors is not None:
        future.set_result(vectors)
