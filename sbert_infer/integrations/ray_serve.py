"""The routes of `sbert-serve` on a Ray cluster, by Ray Serve.

    serve run sbert_infer.integrations.ray_serve:app model=/shared/model.onnx max_replicas=8

There are two deployments. A `Replica` is the application of `sbert-serve` in an actor, with the
batching of `AsyncEngine`. A `Gateway` takes requests and passes each on to a replica; if that dies,
to another one. Ray Serve itself never sends a request twice, as it can't know that embedding a text
again is harmless.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from sbert_infer.errors import DeadlineError, EngineError, SbertInferError, WorkerError
from sbert_infer.serve.app import make_app
from sbert_infer.serve.http.auth import Access
from sbert_infer.serve.http.reloading import Reloading
from sbert_infer.serve.metrics import Metrics
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.settings import ModelFile, Settings
from sbert_infer.serve.wire.problems import Problem, problem_of, respond

Headers = list[tuple[bytes, bytes]]
Vectors = npt.NDArray[np.float32]

_TRIES = 3  # replicas that a request is sent to; a text that kills them all must not go on for ever
_PAUSE_S = 0.1  # before the second try
_QUEUED_TOKENS = "queued_tokens"
# What a gateway holds of all bodies together: as much as a server does (`serve.http.body_memory`).
_HELD_BODIES, _LEAST_HELD_BYTES = 8, 128 * 2**20
_ALWAYS_BYTES = 64 * 2**10  # for an ordinary request, however much large ones hold
# Of one replica, whichever gets the request: they would say nothing about the others.
_OF_ONE_REPLICA = frozenset({("GET", "/"), ("GET", "/metrics"), ("GET", "/metrics/history"), ("POST", "/admin/reload")})


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `app`. The files must be readable on every node."""

    model: str  # what sbert-serve takes: a file or a checkpoint, or NAME=one
    min_replicas: int = 1
    max_replicas: int = 8
    gateways: int = 2
    num_cpus: float = 2  # of each replica
    num_gpus: float = 0
    target_requests: float = 64  # in progress in each replica; more add replicas
    target_queue_tokens: float = 16384  # waiting in each replica; more add replicas
    upscale_delay_s: float = 10
    downscale_delay_s: float = 300
    api_key_file: str | None = None
    settings: dict[str, Any] = {}  # other fields of `Settings`, such as max_queue_tokens


def app(args: Mapping[str, Any]) -> Any:
    """Make the application for `serve.run`, `serve run` and Ray Serve's configuration files.

    >>> serve.run(app({"model": "model.onnx", "max_replicas": 4}))  # doctest: +SKIP
    """
    try:
        from ray import serve
    except ImportError as error:
        message = f"{error.name} is not installed, Ray Serve needs it: pip install 'sbert-infer[serve,ray-serve]'"
        raise EngineError(message) from error
    options = msgspec.convert(args, Options, strict=False)  # a command line has strings only
    settings = _settings(options)
    replicas = serve.deployment(Replica).options(
        max_ongoing_requests=max(1024, math.ceil(4 * options.target_requests)),  # the queue inside refuses, with 429
        autoscaling_config=_autoscaling(options),
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )
    gateways = serve.deployment(Gateway).options(
        num_replicas=options.gateways,
        max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": 0.1},
    )
    return gateways.bind(replicas.bind(settings, options.api_key_file), settings)


def _settings(options: Options) -> Settings:
    model = ModelFile.parse(options.model)
    path = model.path.absolute() if model.path.exists() else model.path  # a replica has another working folder
    if "otlp_endpoint" in options.settings:
        raise EngineError("traces are not sent from Ray Serve: leave out otlp_endpoint")
    if options.settings.get("compute") is not None:
        raise EngineError("what sbert-tune chose is for one machine, all of which a replica has not: leave out compute")
    workers = None if options.num_gpus else max(1, math.ceil(options.num_cpus))
    return Settings(models=(replace(model, path=path),), workers=workers, **options.settings)


def _autoscaling(options: Options) -> dict[str, Any]:
    targets = {"requests": options.target_requests, "queue_tokens": options.target_queue_tokens}
    return {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "upscale_delay_s": options.upscale_delay_s,
        "downscale_delay_s": options.downscale_delay_s,
        "policy": {"policy_function": f"{__name__}:EnoughReplicas", "policy_kwargs": targets},
    }


class EnoughReplicas:
    """Autoscaling: as many replicas as requests in progress, or tokens that wait, call for.

    Tokens alone would remove replicas that are busy but keep up; requests alone do not tell a text
    from a thousand.
    """

    def __init__(self, requests: float, queue_tokens: float) -> None:
        self._requests, self._queue_tokens = requests, queue_tokens

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return how many are wanted. Ray Serve applies the bounds and delays."""
        tokens = sum((context.aggregated_metrics or {}).get(_QUEUED_TOKENS, {}).values())
        wanted = max(context.total_num_requests / self._requests, tokens / self._queue_tokens)
        return math.ceil(wanted), {}


class HttpRequest(NamedTuple):
    """A request, as a gateway passes it on to a replica."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes


class HttpResponse(NamedTuple):
    """A response, as a replica gives it back."""

    status: int
    headers: Headers
    body: bytes


class Replica:
    """The application of `sbert-serve`, in an actor instead of behind a socket."""

    # Ray Serve awaits it, and sends requests only once it has ended.
    async def __init__(self, settings: Settings, key_file: str | None = None) -> None:  # type: ignore[misc]
        if key_file is not None:  # read here, so that keys don't travel through the cluster
            settings = replace(settings, api_key_file=Path(key_file))
        metrics, access = Metrics(), Access(settings)
        self._models = Models(settings, metrics.observer)
        await self._models.open()
        reloading = Reloading(self._models, access, None, settings, metrics)
        self._app: ASGIApp = make_app(self._models, settings, metrics, access, reloading)

    async def http(self, request: HttpRequest) -> HttpResponse:
        """Respond to a request."""
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        await self._app(_scope(request), receive, send)
        start, *rest = messages
        return HttpResponse(start["status"], start["headers"], b"".join(part.get("body", b"") for part in rest))

    async def embed(self, texts: str | list[str], **options: Any) -> Vectors:
        """Encode texts as `AsyncEngine.encode` does."""
        return await self._models.first.engine.encode(texts, **options)

    def check_health(self) -> None:
        """Raise if Ray Serve should replace this replica, as it does after three times."""
        if not self._models.ready:
            raise EngineError("the model does not take calls")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `EnoughReplicas` needs to know."""
        return {_QUEUED_TOKENS: float(sum(model.engine.stats().queued_tokens for model in self._models))}


def _scope(request: HttpRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "server": None,
        "client": None,
        "root_path": "",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "headers": request.headers,
        # What `serve.http.connection` adds: all of the body is here, and a client who leaves
        # cancels the call.
        "sbert.has_come": True,
        "sbert.when_lost": set(),
        "sbert.abort": lambda: None,  # a gateway takes a response at once
    }


class Gateway:
    """Passes requests on to replicas, and once more if a replica dies with them."""

    def __init__(self, replicas: Any, settings: Settings) -> None:
        self._replicas, self._settings = replicas, settings
        self._held_bytes = 0  # of bodies that are being read or passed on

    async def __call__(self, request: Request) -> Response:
        """Pass on a request over HTTP."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/"))
        if (request.method, path) in _OF_ONE_REPLICA:
            return respond(Problem("not_found", "each replica has its own: see Ray's dashboard and metrics"), path)
        body, headers = bytearray(), [(bytes(name), bytes(value)) for name, value in request.scope["headers"]]
        try:
            await self._read(request, body)
            passed = HttpRequest(request.method, path, request.scope["query_string"], headers, bytes(body))
            status, headers, answer = await self._call("http", passed)
        except Problem as problem:
            return respond(problem, path)
        except SbertInferError as error:
            return respond(problem_of(error), path)
        finally:
            self._held_bytes -= len(body)
        response = Response(answer, status)
        response.raw_headers = headers
        return response

    async def embed(self, texts: str | list[str], **options: Any) -> Vectors:
        """Encode texts: `handle.embed.remote(["A cat sat."]).result()`.

        The options and errors are those of `AsyncEngine.encode`.
        """
        vectors: Vectors = await self._call("embed", texts, **options)
        return vectors

    async def _read(self, request: Request, body: bytearray) -> None:
        """Read into `body`.

        One that is too large is cut right behind the limit: a replica refuses it.
        """
        most = self._settings.max_body_bytes
        room = max(_LEAST_HELD_BYTES, _HELD_BODIES * most)
        async for chunk in request.stream():
            piece = chunk[: most + 1 - len(body)]
            body += piece
            self._held_bytes += len(piece)
            if self._held_bytes > room and len(body) > _ALWAYS_BYTES:
                raise Problem("overloaded", "too many large requests at once: try again later", retry_after_s=1.0)
            if len(body) > most:
                break

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of any replica; if it dies meanwhile, of another one."""
        seconds = 2 * self._settings.timeout_s  # for a second try, or until there is a replica
        try:
            return await asyncio.wait_for(self._tries(method, args, kwargs), seconds)
        except asyncio.TimeoutError:
            raise DeadlineError(f"no replica responded within {seconds:g} s") from None

    async def _tries(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from ray.exceptions import RayActorError

        for attempt in range(_TRIES):
            try:
                return await getattr(self._replicas, method).remote(*args, **kwargs)
            except RayActorError:  # noqa: PERF203  it died or can't be reached, which is rare
                await asyncio.sleep(_PAUSE_S * 2**attempt)
        raise WorkerError(f"{_TRIES} replicas in turn died with this request: see their logs", 1.0)
