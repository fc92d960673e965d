"""When the texts of a call waited and ran, noted for callers that trace their calls."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class BatchRun:
    """The run of a batch, shared by the timelines of all calls with texts in it."""

    started: float  # on the monotonic clock
    texts: int
    tokens: int  # padding excluded
    ended: float | None = None  # None: it runs, or was given up


@dataclass
class Timeline:
    """What became of a call. Workers add to it while it runs."""

    arrival: float | None = None  # on the monotonic clock; None: not in the queue yet, or refused
    batches: list[BatchRun] = field(default_factory=list)  # in the order of their starts


# Set by a caller, in whose context the call is then made. A context variable, so that no other
# caller has to pass an argument that is None.
current_timeline: ContextVar[Timeline | None] = ContextVar("current_timeline", default=None)
