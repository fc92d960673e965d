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

    With `turn_s`, it is a lock such as Python's: whoever has it keeps it from one use to the next,
    but is interrupted that long after the first other actor has come to wait, and goes to the end
    of the line.
    """

    name: str
    turn_s: float = math.inf
    intervals: list[Interval] = field(default_factory=list)
    line: deque[tuple[Use, Actor]] = field(default_factory=deque)
    using: tuple[Use, Actor] | None = None
    since: float = 0.0
    turn: int = 0  # how often it has passed from one actor to another

    @property
    def is_lock(self) -> bool:
        """Whether it is kept from one use to the next."""
        return self.turn_s < math.inf

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
        self._want(next(actor, None), actor)

    def _want(self, wanted: Use | Flag | None, actor: Actor) -> None:
        if isinstance(wanted, Use):
            self._ask(wanted, actor)
        elif wanted is not None:
            self._wait(wanted, actor)

    def _wait(self, flag: Flag, actor: Actor) -> None:
        if flag.raised:
            self.start(actor)
        else:
            flag.waiting.append(actor)

    def _ask(self, use: Use, actor: Actor) -> None:
        resource = use.resource
        resource.line.append((use, actor))
        if resource.using is None:
            self._pass_on(resource)
        elif len(resource.line) == 1:
            self._plan_turn(resource)

    def _pass_on(self, resource: Resource) -> None:
        """Give a resource to the next in line."""
        resource.using = None
        resource.turn += 1
        if resource.line:
            self._begin(resource, *resource.line.popleft())
            if resource.line:
                self._plan_turn(resource)

    def _begin(self, resource: Resource, use: Use, actor: Actor) -> None:
        resource.using, resource.since = (use, actor), self.now
        self._plan(self.now + use.seconds, lambda: self._end(resource, use, actor))

    def _end(self, resource: Resource, use: Use, actor: Actor) -> None:
        if resource.using is None or resource.using[0] is not use:
            return  # it was interrupted meanwhile
        self._note(resource, use)
        self._last = self.now
        wanted = next(actor, None)
        if resource.is_lock and isinstance(wanted, Use) and wanted.resource is resource:
            self._begin(resource, wanted, actor)
        else:
            self._pass_on(resource)
            self._want(wanted, actor)

    def _plan_turn(self, resource: Resource) -> None:
        if resource.is_lock:
            turn = resource.turn
            self._plan(self.now + resource.turn_s, lambda: self._interrupt(resource, turn))

    def _interrupt(self, resource: Resource, turn: int) -> None:
        if resource.turn == turn and resource.using is not None:
            use, actor = resource.using
            self._note(resource, use)
            left = max(0.0, use.seconds - (self.now - resource.since))
            resource.line.append((Use(resource, left, use.what), actor))
            self._pass_on(resource)

    def _note(self, resource: Resource, use: Use) -> None:
        if self.now > resource.since:
            resource.intervals.append(Interval(resource.since, self.now, use.what))
