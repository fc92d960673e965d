"""One call of `AsyncEngine.encode` in the queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeVar

import numpy as np

from sbert_infer.backends.base import Array
from sbert_infer.encode.output import Indices, Output
from sbert_infer.errors import DeadlineError, TextError
from sbert_infer.scheduling.request import Request
from sbert_infer.scheduling.timeline import current_timeline
from sbert_infer.text.inputs import characters
from sbert_infer.text.tokenizer import TokenizedTexts
from sbert_infer.types import BULK, INTERACTIVE, Encoded, OnTruncate, Priority, Text

Result = TypeVar("Result")

_CHARACTERS_PER_TOKEN, _SPECIAL_TOKENS = 4, 3  # approximate
_LOOK_S = 0.01  # shortest time between checks, each of which goes through all deadlines
_LATE = "the call was not done in time: raise timeout_s, or send fewer texts at once"


class CallOptions(NamedTuple):
    """The options of a call."""

    prompt: str
    output: Output
    on_truncate: OnTruncate
    deadline: float
    other_side: bool = False  # whether to cut long texts at the opposite end from the model's own
    priority: Priority | None = None  # None: by size
    key: Hashable = None  # calls of one key share its turns and its room in the queue

    def sent_by(self, priority: Priority | None, key: Hashable) -> CallOptions:
        """Return these options for a call of this priority and key."""
        if priority not in (None, INTERACTIVE, BULK):
            raise ValueError(f"priority must be 'interactive', 'bulk' or None, got {priority!r}")
        return self._replace(priority=priority, key=key)


# Tokenizes unique texts, given also the index of each original text among them (None if all differ)
# and the options. Returns the tokens, and how many leading tokens pooling leaves out.
Read = Callable[[list[Text], "Indices | None", CallOptions], tuple[TokenizedTexts, int]]


class Call(Request):
    """A request with its tokens, its vectors so far, and the future that its caller awaits.

    Any thread may use it.
    """

    tokenized: TokenizedTexts
    read_s: float | None = None  # seconds it took to tokenize, if a worker did that

    def __init__(
        self,
        content: TokenizedTexts | list[Text],  # texts are tokenized later, by `read`
        inverse: Indices | None,  # the row of each text, if identical texts share a row
        options: CallOptions,
        *,
        arrival: float,
        prompt_length: int = 0,
        guess: int,  # estimated number of tokens, until they are counted
        read: Read,
    ) -> None:
        super().__init__(
            None,
            arrival=arrival,
            deadline=options.deadline,
            prompt_length=prompt_length,
            priority=options.priority or INTERACTIVE,
            key=options.key,
        )
        self._inverse, self._options, self._read = inverse, options, read
        self._texts: list[Text] | None = None
        self.timeline = current_timeline.get()
        if self.timeline is not None:
            self.timeline.arrival = arrival
        self.future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        if isinstance(content, TokenizedTexts):
            self._keep(content)
        else:
            self._texts, self.texts = content, len(content)
            self.tokens = guess

    def read(self) -> bool:
        """Tokenize the texts, unless they are. Return False, and fail the call, if that fails."""
        if self._texts is not None:
            start = time.monotonic()
            try:
                tokenized, self.prompt_length = self._read(self._texts, self._inverse, self._options)
                self._keep(tokenized)
            except Exception as error:  # the caller must get any error
                self.fail(error)
                return False
            self._texts, self.read_s = None, time.monotonic() - start
        return True

    def _keep(self, tokenized: TokenizedTexts) -> None:
        self.tokenized = tokenized
        self._collector = self._options.output.collect(tokenized)
        self.set_lengths(tokenized.lengths)

    def store(self, rows: Indices, found: Sequence[Array]) -> Indices:
        """Store the output of some texts, and return those with NaN or infinity."""
        return self._collector.put(rows, found)

    def result(self) -> tuple[Encoded | None, Exception | None]:
        """Return the result of the call, which must be complete, or the error in making it."""
        inverse, tokenized = self._inverse, self.tokenized
        try:
            vectors = self._collector.result(inverse)
            return Encoded(vectors, tokenized.tokens(inverse), tokenized.cut(inverse)), None
        except Exception as error:  # the caller must get any error
            return None, error

    def blame(self, row: int, reason: str, *, not_finite: bool) -> None:
        """Fail the call because the text in this row can't be encoded."""
        text = row if self._inverse is None else int(np.flatnonzero(self._inverse == row)[0])
        self.fail(TextError(f"text {text}: {reason}", text, not_finite=not_finite))

    def fail(self, error: Exception) -> None:
        """Give the caller an error instead of vectors."""
        _settle([(self.future, None, error)])


def guess_tokens(texts: Iterable[Text], prompt: str, max_length: int = sys.maxsize) -> int:
    """Estimate the tokens of texts that are not tokenized yet, with `prompt` before each."""
    more = _SPECIAL_TOKENS + len(prompt) // _CHARACTERS_PER_TOKEN
    return sum(min(max_length, characters(text) // _CHARACTERS_PER_TOKEN + more) for text in texts)


def succeed(calls: Iterable[Call]) -> None:
    """Give the callers their vectors."""
    _settle([(call.future, *call.result()) for call in calls])


Outcome = tuple["asyncio.Future[Encoded]", "Encoded | None", "Exception | None"]


def _settle(outcomes: list[Outcome]) -> None:
    """Set the results of futures, from any thread.

    All are set in one go, because waking the event loop is a system call.
    """
    if outcomes:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is waiting
            outcomes[0][0].get_loop().call_soon_threadsafe(_set, outcomes)


def _set(outcomes: list[Outcome]) -> None:
    for future, encoded, error in outcomes:
        if future.done():
            continue
        if error is not None:
            future.set_exception(error)
        elif encoded is not None:
            future.set_result(encoded)


class Deadlines:
    """Fails calls that are not done in time, with one timer for all of them.

    A timer for each call took 5 % of the time of a request.
    """

    def __init__(self, calls: AbstractSet[Call]) -> None:
        self._calls = calls  # calls under way, and finished ones whose callers have not resumed yet
        self._next = math.inf  # when the timer fires
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def note(self, call: Call) -> None:
        """Watch one more call. Usually its deadline is the latest, and there is nothing to do."""
        loop = call.future.get_loop()
        if call.deadline < self._next or (loop is not self._loop and call.deadline < math.inf):
            self._set(loop, call.deadline)

    def _set(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop, self._next = loop, deadline
        self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._look)

    def _look(self) -> None:
        now = time.monotonic()
        self._timer, self._next = None, math.inf
        left = [call for call in self._calls if not call.future.done()]
        for call in left:
            if call.deadline <= now:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    call.future.set_exception(DeadlineError(_LATE))
        deadline = min((call.deadline for call in left if call.deadline > now), default=math.inf)
        if deadline < math.inf and self._loop is not None:
            self._set(self._loop, max(deadline, now + _LOOK_S))


async def within(future: asyncio.Future[Result], deadline: float) -> Result:
    """Wait for `future` until `deadline` on the monotonic clock, or raise `DeadlineError`.

    This does what `asyncio.wait_for` does, at a fifth of the cost.
    """
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
        raise DeadlineError(_LATE) from None
    finally:
        timer.cancel()
