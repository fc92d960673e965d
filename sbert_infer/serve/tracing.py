"""Traces: a span for each request, its wait in the queue, its run, and the batches of that run.

Spans hold names, counts and times, never a text, a key or what a client wrote. They wait in a
bounded queue for a thread that sends them; those that can't be sent are lost. This module needs the
extra `otel`, and is imported only if traces are on.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sbert_infer import __version__
from sbert_infer._util.threads import in_daemon_thread
from sbert_infer.scheduling.timeline import Timeline, current_timeline
from sbert_infer.serve.otlp import Endpoint

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 60.0  # how many spans were lost
_FLUSH_S = 2.0  # to send what still waits at the end
_MAX_BATCHES = 32  # of a request that get a span
_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of a server's requests, and sends them to a collector."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Start the thread that sends spans. OpenTelemetry's variables set the sampler and name."""
        ours = Resource.create({"service.name": "sbert-serve", "service.version": __version__})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint)))
        self._tracer = self._provider.get_tracer("sbert_infer.serve", __version__)

    def begin(self, traceparent: bytes, method: str, route: str | None, start: float) -> RequestTrace:
        """Begin the trace of a request, below the span that its header names, if any.

        The calls that this task makes from now on note their times for it. Of the client's context,
        only this header is read: `tracestate` and `baggage` may hold anything.
        """
        return RequestTrace(self._tracer, traceparent.decode("latin-1"), method, route, start)

    def close(self) -> None:
        """Send what waits, but not for long."""
        concurrent.futures.wait([in_daemon_thread("sbert-serve-traces-end", self._provider.shutdown)], _FLUSH_S)


class RequestTrace:
    """The spans of one request. Times are on the monotonic clock."""

    def __init__(self, tracer: trace.Tracer, traceparent: str, method: str, route: str | None, start: float) -> None:
        self._tracer, self._timeline = tracer, Timeline()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        attributes = {"http.request.method": method}
        if route is not None:
            attributes["http.route"] = route
        self._span = tracer.start_span(
            method if route is None else f"{method} {route}",
            _propagator.extract({"traceparent": traceparent}),
            trace.SpanKind.SERVER,
            attributes,
            start_time=self._ns(start),
        )
        # Requests on one connection share a context, so this replaces the one before it.
        current_timeline.set(self._timeline if self._span.is_recording() else None)

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        """The header that tells the client under which ids to find the request."""
        context = self._span.get_span_context()
        trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
        return b"traceresponse", f"00-{trace_id}-{span_id}-{context.trace_flags:02x}".encode()

    def end(self, *, status: int, model: str, texts: int, tokens: int, at: float) -> None:
        """End the request's span, after those of what its call has noted."""
        if not self._span.is_recording():
            return
        self._add_children(at)
        self._span.set_attribute("http.response.status_code", status)
        self._span.set_attribute("sbert.status_class", f"{status // 100}xx")
        if model:
            self._span.set_attributes({"sbert.model": model, "sbert.texts": texts, "sbert.tokens": tokens})
        if status >= 500:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(self._ns(at))

    def _add_children(self, at: float) -> None:
        """Add the spans of the queue and the run, up to now if they have not ended."""
        arrival, batches = self._timeline.arrival, self._timeline.batches[:]
        if arrival is None:
            return
        started = min((batch.started for batch in batches), default=at)
        self._add(self._span, "queue", arrival, started)
        if not batches:
            return
        ended = min(at, max(at if batch.ended is None else batch.ended for batch in batches))
        run = self._add(self._span, "run", started, ended, {"sbert.batches": len(batches)})
        for batch in batches[:_MAX_BATCHES]:
            size = {"sbert.batch.texts": batch.texts, "sbert.batch.tokens": batch.tokens}
            self._add(run, "batch", batch.started, at if batch.ended is None else batch.ended, size)

    def _add(
        self, parent: trace.Span, name: str, start: float, end: float, attributes: dict[str, int] | None = None
    ) -> trace.Span:
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._ns(start))
        span.end(self._ns(end))
        return span

    def _ns(self, at: float) -> int:
        return self._epoch_ns + round(at * 1e9)


class _Exporter(SpanExporter):
    """Sends each batch of spans once: a collector that is down costs spans, and no memory."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lost, self._told_at = 0, -math.inf  # spans that the log does not know about, since when

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some spans, or lose them."""
        try:
            self._endpoint.post(encode_spans(spans).SerializeToString())
        except OSError as error:
            self._lose(len(spans), error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _lose(self, spans: int, error: OSError) -> None:
        self._lost += spans
        now = time.monotonic()
        if now > self._told_at + _TELL_EVERY_S:
            reason = error.strerror or error
            logger.warning("%d spans were lost: they could not be sent to %s: %s", self._lost, self._endpoint, reason)
            self._lost, self._told_at = 0, now
