"""The server's life: bind, open the models, serve, reload on SIGHUP, drain on SIGTERM, end."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn

from sbert_infer.errors import EngineError
from sbert_infer.serve.app import make_app, make_metrics_app
from sbert_infer.serve.http.auth import Access
from sbert_infer.serve.http.connection import connection_class
from sbert_infer.serve.http.reloading import Reloading
from sbert_infer.serve.http.request_log import RequestLog
from sbert_infer.serve.http.tls import Certificate
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.otlp import find_endpoint
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem

if TYPE_CHECKING:  # needs packages that may be missing
    from sbert_infer.serve.tracing import Tracing

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_OTHER_FILES = 200
_LAST_HANDSHAKES_S = 2.0  # for connections that wait or shake hands when the server is told to stop
_HANDSHAKE_S = 10.0  # at most: until it ends, --max-connections does not count a connection
_ACCEPT_AGAIN_S = 1.0  # after an error


class Server:
    """One server. `run` returns when it was stopped and everything is closed."""

    def __init__(self, settings: Settings, on_started: Callable[[str], object] = lambda url: None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.models = Models(settings, self.metrics.observer)
        self._access = Access(settings)
        self._certificate = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            self._certificate = Certificate(settings.tls_cert, settings.tls_key)
        self._reloading = Reloading(self.models, self._access, self._certificate, settings, self.metrics)
        self._tracing: Tracing | None = None
        self._on_started = on_started  # called with the server's address when it takes requests
        self._uvicorn: _Uvicorn | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._until = 0.0  # when to end, even if requests are in progress
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Serve in this thread until stopped. Signals are handled in the main thread only."""
        settings = self.settings
        handshakes = 0 if settings.tls_cert is None else settings.max_connections
        _allow_files(settings.max_connections + handshakes + _OTHER_FILES)
        with ExitStack() as stack:  # before the models are opened, which may take minutes
            self._tracing = _open_tracing(settings)
            if self._tracing is not None:
                stack.callback(self._tracing.close)
            listener = stack.enter_context(_bound(settings.host, settings.port))
            for_metrics = None
            if settings.metrics_port is not None:
                for_metrics = stack.enter_context(_bound(settings.host, settings.metrics_port))
            _run_in_loop(self._run(listener, for_metrics))

    def stop(self) -> None:
        """Stop being ready; after a delay, take no more connections and end the requests."""
        if self._stopping is None:
            self.models.draining = True
            self._stopping = asyncio.ensure_future(self._stop())

    def stop_soon(self) -> None:
        """Call `stop` from another thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop)

    async def _stop(self) -> None:
        logger.info("stopping: requests in progress have %g s to end", self.settings.drain_s)
        self._until = time.monotonic() + self.settings.drain_delay_s + self.settings.drain_s
        await asyncio.sleep(self.settings.drain_delay_s)
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    async def _run(self, listener: socket.socket, for_metrics: socket.socket | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle_signals()
        await self.models.open()
        self.metrics.watch(self.models)
        ports = self._ports(listener, for_metrics)
        self._uvicorn = _Uvicorn(ports, self.settings, lambda: self._announce(ports))
        self.metrics.watch_connections(self._uvicorn.server_state.connections)
        if self._stopping is not None and self._stopping.done():
            self._uvicorn.should_exit = True  # told to stop while the models were opened
        keeping = asyncio.ensure_future(self.metrics.history.keep())
        gc.freeze()  # what exists now stays: collecting it again took 5 % of the event loop's time
        try:
            await self._uvicorn.serve()
        finally:
            keeping.cancel()
            await self.models.close(max(0.0, self._until - time.monotonic()))
            logger.info("stopped")

    def _ports(self, listener: socket.socket, for_metrics: socket.socket | None) -> list[_Port]:
        parts = (self.models, self.settings, self.metrics, self._access, self._reloading)
        tls = None if self._certificate is None else self._certificate.context
        ports = [_Port(listener, _config(make_app(*parts, self._tracing), self.settings), tls)]
        if for_metrics is not None:
            ports.append(_Port(for_metrics, _config(make_metrics_app(*parts), self.settings), None))
        return ports

    def _announce(self, ports: list[_Port]) -> None:
        url = ports[0].url
        for port in ports[1:]:
            logger.info("metrics and probes, for anyone, on %s", port.url)
        logger.info("serving %s on %s", ", ".join(model.name for model in self.models), url)
        if not self._access.keys and not ipaddress.ip_address(ports[0].listener.getsockname()[0]).is_loopback:
            logger.warning("anyone who can reach %s may use this server: see --api-key-file", url)
        self._on_started(url)

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._on_stop_signal, number)
            loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)
        except (NotImplementedError, RuntimeError, ValueError, AttributeError):
            return  # not the main thread, or a system without signals

    def _on_stop_signal(self, number: int) -> None:
        if self._stopping is not None or self._uvicorn is None:
            os._exit(128 + number)  # asked twice, or before anything was served: end at once
        self.stop()

    def _on_reload_signal(self) -> None:
        if self._uvicorn is None or self._stopping is not None:
            return  # the models are being opened, or closed
        task = asyncio.ensure_future(self._reload())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self) -> None:
        try:
            await self._reloading.reload()
        except Problem:
            return  # it is in the log


class _Port(NamedTuple):
    """A bound socket, and what is served there."""

    listener: socket.socket
    config: uvicorn.Config
    tls: ssl.SSLContext | None

    @property
    def url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    """Uvicorn on several ports, without its signals, which would end the process by the signal."""

    def __init__(self, ports: list[_Port], settings: Settings, on_started: Callable[[], object]) -> None:
        super().__init__(ports[0].config)
        self._ports, self._on_started = ports, on_started
        self._handshake_s = min(settings.read_timeout_s, _HANDSHAKE_S)
        self._most_handshakes = settings.max_connections
        self._handshakes: dict[asyncio.Task[Any], None] = {}  # the oldest first
        # On Windows the event loop can't watch a socket, and https is as uvicorn has it.
        self._watched = [port for port in ports if port.tls is not None and sys.platform != "win32"]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but for https with a bound on what has not shaken hands."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self._maker(port), sock=port.listener, backlog=_BACKLOG, **self._tls(port))
            for port in self._ports
            if port not in self._watched
        ]
        for port in self._watched:
            port.listener.setblocking(False)
            port.listener.listen(_BACKLOG)
            self._watch(port)
        self.started = True
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that wait, which closing would reset; then end as uvicorn does."""
        waiting = [(port, connection) for port in self._ports for connection in _accept_all(port.listener)]
        for server in self.servers:
            server.close()
        for port in self._watched:
            asyncio.get_running_loop().remove_reader(port.listener)
            port.listener.close()
        for port, connection in waiting:
            self._welcome(port, connection)
        if self._handshakes:
            await asyncio.wait(self._handshakes, timeout=_LAST_HANDSHAKES_S)
        for late in list(self._handshakes):
            late.cancel()
        await super().shutdown(sockets)

    def _watch(self, port: _Port) -> None:
        """Accept connections of a port from now on."""
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(port.listener, self._accept, port)

    def _accept(self, port: _Port) -> None:
        """Accept a connection; if too many are shaking hands, the oldest of them has to go."""
        try:
            connection, _ = port.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has left
        except OSError as error:
            if self._handshakes:  # too many open files: once one is closed, this is called again
                self._drop_oldest()
                return
            logger.warning("a connection could not be accepted: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(port.listener)
            loop.call_later(_ACCEPT_AGAIN_S, self._watch, port)
            return
        connection.setblocking(False)
        self._welcome(port, connection)
        if len(self._handshakes) > self._most_handshakes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._handshakes))
        del self._handshakes[oldest]
        oldest.cancel()

    def _welcome(self, port: _Port, connection: socket.socket) -> None:
        """Shake hands, for https, and begin to serve a connection."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(loop.connect_accepted_socket(self._maker(port), connection, **self._tls(port)))
        self._handshakes[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """Drop a task that has ended. A client that failed is no error of ours."""
        self._handshakes.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):
            logger.warning("a connection could not be served", exc_info=error)

    def _tls(self, port: _Port) -> dict[str, Any]:
        return {} if port.tls is None else {"ssl": port.tls, "ssl_handshake_timeout": self._handshake_s}

    def _maker(self, port: _Port) -> Callable[[], asyncio.Protocol]:
        """Make the function that makes the connections of a port."""
        if not port.config.loaded:
            port.config.load()
        make: Callable[..., asyncio.Protocol] = port.config.http_protocol_class
        return lambda: make(port.config, self.server_state, {})

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _open_tracing(settings: Settings) -> Tracing | None:
    """Start to send traces, if an endpoint is named for them."""
    endpoint = find_endpoint(settings.otlp_endpoint, os.environ)
    if endpoint is None:
        return None
    try:
        from sbert_infer.serve.tracing import Tracing
    except ImportError as error:
        ways = "pip install 'sbert-infer[otel]', or set OTEL_TRACES_EXPORTER=none"
        raise EngineError(f"{error.name} is not installed, sending traces to {endpoint} needs it: {ways}") from error
    logger.info("sending traces to %s", endpoint)
    return Tracing(endpoint)


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files and connections, as far as the system allows."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < wanted:
        logger.warning("at most %d files may be open (ulimit -n), --max-connections needs %d", limit, wanted)


def _accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    listener.setblocking(False)
    with suppress(OSError):  # raised when there are no more
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            yield connection


def _run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:  # Windows
        asyncio.run(main)
    else:
        uvloop.run(main)


def _config(app: RequestLog, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connection_class(settings, app),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=75,  # longer than the 60 s after which most proxies close theirs
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket that does not listen yet: no client should wait for models to open."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            error.filename = f"{host}:{port}"
            raise
        yield listener
