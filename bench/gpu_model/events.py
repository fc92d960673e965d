"""A discrete-event simulation: actors that use resources one after another, on a clock of its own.

An actor is a generator. It yields what it waits for: the end of a `Use` of a resource, or a `Flag`
that another actor raises. There are no threads and no real time, so every run is the same.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Resource:
    """What one actor at a time can use; others wait in line.

    With `turn_s`, whoever uses it is interrupted that long after the first other actor has come to
    wait, and goes to the end of the line: so does Python with its interpreter lock.
    """

    name: str
    turn_s: float = math.inf
    intervals: list[Interval] = field(default_factory=list)
    line: deque[tuple[Use, Actor]] = field(default_factory=deque)
    using: tuple[Use, Actor] | None = None
    since: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds during which it was used."""
        return sum(interval.end - interval.start for interval in self.intervals)


@dataclass(eq=False)
class Use:
    """Some seconds of a resource; `what` names the work."""

    resource: Resource
    seconds: float
    what: str = ""


@dataclass(frozen=True)
class Interval:
    """When a resource was used, and for what."""

    start: float
    end: float
    what: str


class Flag:
    """Something that happens once, and that actors can wait for."""

    def __init__(self) -> None:
        self.raised = False
        self.waiting: list[Actor] = []


Actor = Generator["Use | Flag", None, None]


class Events:
    """Runs actors until nothing happens any more."""

    def __init__(self) -> None:
        self.now = self._last = 0.0
        self._ahead: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()  # what is due at the same time happens in the order of its planning

    def start(self, actor: Actor, at: float = 0.0) -> None:
        """Let an actor begin, now or at a later time."""
        self._plan(max(at, self.now), lambda: self._go_on(actor))

    def lift(self, flag: Flag) -> None:
        """Raise a flag: whoever waits for it goes on."""
        flag.raised = True
        for actor in flag.waiting:
            self.start(actor)
        flag.waiting.clear()

    def run(self) -> float:
        """Run to the end, and return when an actor last did something."""
        while self._ahead:
            self.now, _, happen = heapq.heappop(self._ahead)
            happen()
        return self._last

    def _plan(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._ahead, (at, next(self._number), happen))

    def _go_on(self, actor: Actor) -> None:
        self._last = self.now
        wanted = next(actor, None)
        if isinstance(wanted, Use):
            self._ask(wanted, actor)
        elif wanted is not None and wanted.raised:
            self.start(actor)
        elif wanted is not None:
            wanted.waiting.append(actor)

    def _ask(self, use: Use, actor: Actor) -> None:
        resource = use.resource
        resource.line.append((use, actor))
        if resource.using is None:
            self._begin(resource)
        elif len(resource.line) == 1:
            self._plan_turn(resource)

    def _begin(self, resource: Resource) -> None:
        resource.using = None
        if not resource.line:
            return
        resource.using, resource.since = resource.line.popleft(), self.now
        begun, since = resource.using, self.now
        self._plan(self.now + begun[0].seconds, lambda: self._end(resource, begun, since))
        if resource.line:
            self._plan_turn(resource)

    def _end(self, resource: Resource, begun: tuple[Use, Actor], since: float) -> None:
        if (resource.using, resource.since) == (begun, since):  # else it was interrupted meanwhile
            self._note(resource, begun[0])
            self._begin(resource)
            self._go_on(begun[1])

    def _plan_turn(self, resource: Resource) -> None:
        if resource.turn_s < math.inf:
            begun, since = resource.using, resource.since
            self._plan(self.now + resource.turn_s, lambda: self._turn(resource, begun, since))

    def _turn(self, resource: Resource, begun: tuple[Use, Actor] | None, since: float) -> None:
        if begun is not None and (resource.using, resource.since) == (begun, since):
            use, actor = begun
            self._note(resource, use)
            left = max(0.0, use.seconds - (self.now - since))
            resource.line.append((Use(resource, left, use.what), actor))
            self._begin(resource)

    def _note(self, resource: Resource, use: Use) -> None:
        if self.now > resource.since:
            resource.intervals.append(Interval(resource.since, self.now, use.what))
