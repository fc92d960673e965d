"""Send requests over keep-alive connections and record when responses came, without parsing them.

The generator shares the machine with the server, so it must be light. Against a server that
responds immediately, 500 requests/s on 2 busy cores, a request took 0.12 to 0.14 ms of CPU with
this and 0.35 to 0.37 with aiohttp; httpx could not keep up. Hence asyncio's protocols, with
httptools for the parsing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sbert_infer.bench.load.target import Target

MAX_CONNECTIONS = 4096  # with all of them busy, a request waits for one, which counts as latency
_OTHER_FILES = 128  # open files allowed besides connections
_SWEEP_S = 0.05
_PAUSE_S = 0.05  # in a closed loop, after anything but a response with status 200

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and its outcome, with times of `time.perf_counter`."""

    request: int  # index into the client's requests
    due: float  # when it should have been sent
    sent: float = 0.0
    done: float = 0.0
    status: int = 0
    body: bytes = b""
    error: str = ""  # why there is no response

    @property
    def latency_s(self) -> float:
        """Seconds since it was due, not since it was sent: a late start is part of the wait."""
        return self.done - self.due


class LoadClient:
    """Sends `requests`, which are whole HTTP requests as bytes, to one server in one loop."""

    def __init__(self, target: Target, requests: Sequence[bytes], timeout_s: float) -> None:
        import httptools  # imported here, since only --serve needs it

        self.http = httptools
        self._host, self._port = target.address
        self._ssl = ssl.create_default_context() if target.secure else None
        self._requests = requests
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []  # last in, first out: keeps few connections warm
        self._waiting: deque[Exchange] = deque()
        self._in_flight: dict[Exchange, _Connection] = {}
        self._connections = 0
        self._most_connections = _allow_connections()
        self._opening: set[asyncio.Task[None]] = set()
        self._settled: Callable[[Exchange], object] = lambda exchange: None

    async def open_loop(self, arrivals: Sequence[float], order: Sequence[int], connections: int) -> list[Exchange]:
        """Send request `order[i]` at second `arrivals[i]`, then wait for all responses."""
        exchanges: list[Exchange] = []
        left = len(arrivals)
        everything = asyncio.get_running_loop().create_future()

        def settled(exchange: Exchange) -> None:
            nonlocal left
            left -= 1
            if not left:
                everything.set_result(None)

        async with self._session(connections, settled):
            start = time.perf_counter() + 0.01
            for at, request in zip(arrivals, order, strict=True):
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))  # yields even if it is late
                exchanges.append(exchange := Exchange(request, start + at))
                self._send(exchange)
            if exchanges:
                await everything
        return exchanges

    async def closed_loop(self, clients: int, order: Iterator[int], seconds: float | None = None) -> list[Exchange]:
        """Let each of `clients` send its next request as soon as it has a response.

        New requests are sent until `seconds` have passed or `order` ends.
        """
        exchanges: list[Exchange] = []
        loop = asyncio.get_running_loop()
        everything = loop.create_future()
        active = clients

        def step() -> None:
            nonlocal active
            now = time.perf_counter()
            request = next(order, None) if seconds is None or now < start + seconds else None
            if request is not None:
                exchanges.append(exchange := Exchange(request, now))
                self._send(exchange)
                return
            active -= 1
            if not active:
                everything.set_result(None)

        def settled(exchange: Exchange) -> None:
            if exchange.status == 200:
                step()
            else:
                loop.call_later(_PAUSE_S, step)

        async with self._session(clients, settled):
            start = time.perf_counter()
            for _ in range(clients):
                step()
            await everything
        return exchanges

    # Called by the connections --------------------------------------------------------------------

    def free(self, connection: _Connection) -> None:
        """Take back a connection that is ready for the next request."""
        if self._waiting:
            self._send_over(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._connections -= 1
        if connection in self._idle:
            self._idle.remove(connection)
        self._open_if_needed()

    def settle(self, exchange: Exchange, error: str = "") -> None:
        """Record the end of an exchange."""
        exchange.done = time.perf_counter()
        exchange.error = error
        self._in_flight.pop(exchange, None)
        self._settled(exchange)

    # Internal -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _session(self, connections: int, settled: Callable[[Exchange], object]) -> AsyncIterator[None]:
        """Keep connections open for one loop; the first requests need not wait for one."""
        self._settled = settled
        await asyncio.gather(*(self._connect() for _ in range(connections)))
        sweeper = asyncio.ensure_future(self._sweep())
        try:
            yield
        finally:
            for task in (sweeper, *self._opening):
                task.cancel()
            await asyncio.gather(*self._opening, return_exceptions=True)
            for connection in [*self._idle, *self._in_flight.values()]:
                connection.close()

    async def _sweep(self) -> None:
        """Time out exchanges that take too long. Polling is cheaper than a timer for each."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            overdue = time.perf_counter() - self._timeout_s
            for exchange in [exchange for exchange in self._in_flight if exchange.due < overdue]:
                self._in_flight[exchange].close()
                self.settle(exchange, "timeout")
            while self._waiting and self._waiting[0].due < overdue:
                self.settle(self._waiting.popleft(), "timeout")

    def _send(self, exchange: Exchange) -> None:
        if self._idle:
            self._send_over(self._idle.pop(), exchange)
            return
        self._waiting.append(exchange)
        self._open_if_needed()

    def _send_over(self, connection: _Connection, exchange: Exchange) -> None:
        self._in_flight[exchange] = connection
        connection.send(exchange, self._requests[exchange.request])

    def _open_if_needed(self) -> None:
        if len(self._waiting) > len(self._opening) and self._connections + len(self._opening) < self._most_connections:
            task = asyncio.ensure_future(self._connect())
            self._opening.add(task)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            # The timeout of a request: a full backlog must not delay an arrival for longer.
            opening = loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._ssl)
            _, connection = await asyncio.wait_for(opening, self._timeout_s)
        except (OSError, asyncio.TimeoutError):
            if self._waiting:
                self.settle(self._waiting.popleft(), "no connection")
            return
        finally:
            # Not in a callback of the task, which runs later: a request that comes in between would
            # wait for a connection that is already taken.
            if task := asyncio.current_task():
                self._opening.discard(task)
        self._connections += 1
        self.free(connection)


class _Connection(asyncio.Protocol):
    """One keep-alive connection, with at most one request in flight."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self._parser = client.http.HttpResponseParser(self)
        self._transport: Any = None
        self._exchange: Exchange | None = None
        self._body: list[bytes] = []

    def send(self, exchange: Exchange, request: bytes) -> None:
        self._exchange = exchange
        exchange.sent = time.perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        self._exchange = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except self._client.http.HttpParserError:
            self._fail("not HTTP")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.lost(self)
        self._fail("connection lost")

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, part: bytes) -> None:
        self._body.append(part)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.status = self._parser.get_status_code()
        exchange.body = b"".join(self._body)
        if self._parser.should_keep_alive():
            self._client.free(self)
        else:
            self._transport.close()
        self._client.settle(exchange)

    def _fail(self, error: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._client.settle(exchange, error)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in an event loop of its own, without garbage collection; uvloop if installed."""
    run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
    with contextlib.suppress(ImportError):  # not available on every system
        run = importlib.import_module("uvloop").run
    gc.disable()
    try:
        return run(work)
    finally:
        gc.enable()


def _allow_connections() -> int:
    """Raise the limit of open files as needed; return how many connections it allows."""
    try:
        import resource
    except ImportError:  # not on Unix
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft - _OTHER_FILES))
