"""Around every request: its id, its log line, its metrics, and a response if all else fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sbert_infer.errors import SbertInferError, TextError, WorkerError
from sbert_infer.serve.http.auth import OPEN_PATHS, first_header
from sbert_infer.serve.http.body import ClientLeft
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.wire.problems import Problem, respond

if TYPE_CHECKING:  # needs packages that may be missing
    from sbert_infer.serve.tracing import RequestTrace, Tracing

access = logging.getLogger("sbert_infer.serve.access")
logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
POLLED = frozenset({*OPEN_PATHS, "/metrics"})  # every second: successes are not logged
_PROCESS, _numbers = secrets.token_hex(6), itertools.count(1)  # make ids that no other server gives
_REFUSALS_EVERY_S = 1.0
_CLIENT_LEFT = 499  # as in nginx; never sent
_MAX_PATH = 256  # characters of it in the log
# What is refused in bulk shares a line a second: a line each would cost more than the refusal.
_BULK = {
    HTTPStatus.TOO_MANY_REQUESTS: "refused %d requests with 429: the server is overloaded",
    HTTPStatus.SERVICE_UNAVAILABLE: "refused %d connections with 503: see --max-connections",
}


@dataclass
class Record:
    """What the log says about a request: no texts, no keys, no query string."""

    id: str
    method: str
    path: str  # cut if it is long
    start: float  # on the monotonic clock
    status: int = 0  # 0: none yet
    seconds: float = 0.0  # until the response's last byte
    model: str = ""  # its name, if one was called
    texts: int = 0
    tokens: int = 0
    bytes: int = 0  # of the response's body
    trace: RequestTrace | None = None  # if traces are on
    fingerprint: str = ""  # of the model that ran, for a header


def new_record(headers: Iterable[tuple[bytes, bytes]], method: str, path: str) -> Record:
    """Begin the record of a request."""
    if len(path) > _MAX_PATH:
        path = f"{path[:_MAX_PATH]}..."
    return Record(_request_id(headers), method, path, time.monotonic())


def record_of(request: Request) -> Record:
    """The record of a request, to which its handler adds what only it knows."""
    record: Record = request.scope["sbert.record"]
    return record


class RequestLog:
    """The outermost middleware: notes what becomes of each request."""

    def __init__(
        self, app: ASGIApp, routes: Collection[str], models: Models, metrics: Metrics, tracing: Tracing | None = None
    ) -> None:
        self._app, self._models, self._metrics = app, models, metrics
        self._routes = frozenset(routes)
        self._patterns = [compile_path(route)[:2] for route in routes if "{" in route]
        self._tracing = tracing
        self._refusals: Counter[HTTPStatus] = Counter()  # not logged yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and note what becomes of it."""
        record = new_record(scope["headers"], scope["method"], scope["path"])
        scope["sbert.record"] = record
        if self._tracing is not None and record.path not in POLLED:
            route = self._route(record.path)
            parent = first_header(scope["headers"], b"traceparent")
            record.trace = self._tracing.begin(parent, record.method, route, record.start)

        async def noting(message: Message) -> None:
            self._note(message, record)
            await send(message)

        self._metrics.in_progress += 1
        try:
            await self._app(scope, receive, noting)
        except ClientLeft:
            record.status = _CLIENT_LEFT
        except asyncio.CancelledError:  # the time to drain is over
            if record.status:
                raise
            problem = Problem("model_unavailable", "the server is about to stop", retry_after_s=1.0)
            await respond(problem, record.path)(scope, receive, noting)
        except Exception as error:
            _log_unexpected(error, record)
            if not record.status:  # else part of a response was sent, and uvicorn closes the connection
                problem = Problem("internal_error", f"unexpected error; the server's log has it under {record.id}")
                await respond(problem, record.path)(scope, receive, noting)
        finally:
            self._metrics.in_progress -= 1
            self.finish(record, is_bulk=record.status == HTTPStatus.TOO_MANY_REQUESTS)

    def _note(self, message: Message, record: Record) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"].append((b"x-request-id", record.id.encode()))
            if record.trace is not None:
                message["headers"].append(record.trace.response_header)
            if record.fingerprint:
                message["headers"].append((b"x-model-fingerprint", record.fingerprint.encode()))
            if self._models.draining:
                message["headers"].append((b"connection", b"close"))
        else:
            record.bytes += len(message.get("body", b""))

    def finish(self, record: Record, *, is_bulk: bool = False) -> None:
        """Count and log a response that was sent, or its client that has left."""
        record.status = record.status or _CLIENT_LEFT
        now = time.monotonic()
        record.seconds = now - record.start
        if record.trace is not None:
            record.trace.end(status=record.status, model=record.model, texts=record.texts, tokens=record.tokens, at=now)
        self._metrics.count_response(self._route(record.path) or "other", record.status, record.seconds)
        if is_bulk:
            self._count_refusal(HTTPStatus(record.status))
        else:
            quiet = record.path in POLLED and record.status < HTTPStatus.BAD_REQUEST
            access.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"record": record})

    def _route(self, path: str) -> str | None:
        """The route of a path, without what a client chose in it: `/v1/models/{name}`."""
        if path in self._routes:
            return path
        return next((route for pattern, route in self._patterns if pattern.match(path)), None)

    def _count_refusal(self, status: HTTPStatus) -> None:
        if not self._refusals:
            asyncio.get_running_loop().call_later(_REFUSALS_EVERY_S, self._log_refusals)
        self._refusals[status] += 1

    def _log_refusals(self) -> None:
        for status, count in self._refusals.items():
            logger.warning(_BULK[status], count)
        self._refusals.clear()


def log_engine_error(error: SbertInferError, request: Request) -> None:
    """Log the reason of an error that its client does not get to see."""
    if isinstance(error, (TextError, WorkerError)):
        logger.warning("request %s: %s", record_of(request).id, error)


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id that the client has given, if it is safe to log, or a new one."""
    given = first_header(headers, b"x-request-id").decode("latin-1")
    return given if _SANE_ID.fullmatch(given) else f"{_PROCESS}-{next(_numbers):x}"


def _log_unexpected(error: Exception, record: Record) -> None:
    """Log where an error happened, but not its message, which may hold a client's text."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s: unexpected %s\n%s", record.id, type(error).__name__, where.rstrip())
