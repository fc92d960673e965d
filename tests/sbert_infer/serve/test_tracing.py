"""Traces, as a server of our own gets them by HTTP and reads them with OTLP's own messages."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from sbert_infer.serve.cli import main
from tests.sbert_infer.serve.conftest import Running, until

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}

Start = Callable[..., Running]


class Collector:
    """A receiver of traces. While `hold` is clear, it reads messages and does not respond."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.hold = threading.Event()
        self.hold.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = self.rfile.read(int(self.headers["content-length"]))
                if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
                    self.send_error(404)
                    return
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.messages.append(message)
                collector.hold.wait()
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.hold.set()
        self._http.shutdown()
        self._http.server_close()

    def spans(self) -> list[Span]:
        found = map(ExportTraceServiceRequest.FromString, self.messages)
        return [span for each in found for group in each.resource_spans for s in group.scope_spans for span in s.spans]

    def resource(self) -> dict[str, Any]:
        return attributes(ExportTraceServiceRequest.FromString(self.messages[0]).resource_spans[0].resource)


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_a_request_is_a_span_below_its_callers_with_its_queue_run_and_batch(
    start_server: Start, collector: Collector
) -> None:
    server = start_server(otlp_endpoint=collector.url)
    response = server.post("/v1/embeddings", {"input": ["a cat", "a dog", "a cat"]}, headers=TRACEPARENT)
    tokens = response.json()["usage"]["total_tokens"]
    server.stop()

    spans = {span.name: span for span in collector.spans()}
    assert set(spans) == {"POST /v1/embeddings", "queue", "run", "batch"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    request, queue, run, batch = spans["POST /v1/embeddings"], spans["queue"], spans["run"], spans["batch"]
    assert request.kind == Span.SPAN_KIND_SERVER
    assert request.parent_span_id.hex() == CALLER
    assert queue.parent_span_id == run.parent_span_id == request.span_id
    assert batch.parent_span_id == run.span_id
    assert response.headers["traceresponse"] == f"00-{TRACE}-{request.span_id.hex()}-01"

    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "sbert.status_class": "2xx",
        "sbert.model": "small",
        "sbert.texts": 3,
        "sbert.tokens": tokens,
    }
    assert attributes(run) == {"sbert.batches": 1}
    assert attributes(batch)["sbert.batch.texts"] == 2  # equal texts of a request run once
    assert 0 < attributes(batch)["sbert.batch.tokens"] < tokens
    assert request.start_time_unix_nano <= queue.start_time_unix_nano <= queue.end_time_unix_nano
    assert queue.end_time_unix_nano == run.start_time_unix_nano == batch.start_time_unix_nano
    assert batch.end_time_unix_nano == run.end_time_unix_nano <= request.end_time_unix_nano
    assert collector.resource()["service.name"] == "sbert-serve"


def test_requests_without_a_caller_have_traces_of_their_own(start_server: Start, collector: Collector) -> None:
    server = start_server(otlp_endpoint=collector.url)
    for headers in ({}, {"traceparent": "00-nonsense"}):
        server.post("/embed", {"inputs": "a cat"}, headers=headers)
    server.stop()
    requests = [span for span in collector.spans() if span.name == "POST /embed"]
    assert [span.parent_span_id for span in requests] == [b"", b""]
    assert requests[0].trace_id != requests[1].trace_id


def test_a_large_request_has_a_span_for_each_of_its_first_batches(start_server: Start, collector: Collector) -> None:
    server = start_server(otlp_endpoint=collector.url, max_batch_tokens=16)
    server.post("/embed", {"inputs": [f"text number {number} of many" for number in range(200)]})
    server.stop()
    (run,) = (span for span in collector.spans() if span.name == "run")
    batches = [span for span in collector.spans() if span.name == "batch"]
    assert attributes(run)["sbert.batches"] > len(batches) == 32
    assert {span.parent_span_id for span in batches} == {run.span_id}


def test_errors_have_their_class(start_server: Start, collector: Collector) -> None:
    server = start_server(otlp_endpoint=collector.url, timeout_s=1e-6)
    server.post("/embed", {"inputs": 1})
    late = server.post("/embed", {"inputs": "a cat"})
    assert late.status_code == 503
    server.stop()
    refused, failed = (span for span in collector.spans() if span.name == "POST /embed")
    assert attributes(refused)["sbert.status_class"] == "4xx"
    assert refused.status.code == Status.STATUS_CODE_UNSET
    assert attributes(failed)["sbert.status_class"] == "5xx"
    assert failed.status.code == Status.STATUS_CODE_ERROR


def test_no_text_and_no_key_is_in_a_span(start_server: Start, collector: Collector) -> None:
    server = start_server(otlp_endpoint=collector.url, keys=("SECRET-key",))
    headers = {**TRACEPARENT, "tracestate": "a=SECRET", "baggage": "b=SECRET", "x-request-id": "SECRET"}
    assert server.post("/embed?key=SECRET", {"inputs": "a SECRET text"}, headers=headers).status_code == 200
    server.post("/embed", {"inputs": "x", "model": "SECRET"}, headers=headers)
    server.post("/SECRET", {"inputs": "x"}, headers=headers)
    server.post("/embed", {"inputs": "x"}, headers={"authorization": "Bearer SECRET"})
    server.stop()
    names = sorted(span.name for span in collector.spans() if span.kind == Span.SPAN_KIND_SERVER)
    assert names == ["POST", "POST /embed", "POST /embed", "POST /embed"]
    assert not any(b"SECRET" in message for message in collector.messages)


def test_probes_and_scrapes_have_no_spans(start_server: Start, collector: Collector) -> None:
    server = start_server(otlp_endpoint=collector.url)
    for path in ("/health", "/metrics"):
        assert "traceresponse" not in server.client.get(path).headers
    server.stop()
    assert collector.spans() == []


def test_the_standard_variables_turn_traces_on(
    start_server: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url + "/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=team%20a, x-other=1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    server = start_server()
    server.post("/embed", {"inputs": "a cat"})
    until(lambda: bool(collector.spans()))  # while the server runs
    assert collector.headers[0]["x-tenant"] == "team a"
    assert collector.resource()["service.name"] == "search"
    assert collector.resource()["deployment.environment"] == "test"


def test_the_sampler_and_the_caller_may_leave_requests_out(
    start_server: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    server = start_server(otlp_endpoint=collector.url)
    flags = int(server.post("/embed", {"inputs": "a"}).headers["traceresponse"].rpartition("-")[2], 16)
    assert not flags & 1  # not sampled
    server.post("/embed", {"inputs": "a"}, headers=TRACEPARENT)
    server.stop()
    assert {span.trace_id.hex() for span in collector.spans()} == {TRACE}


def test_off_by_default(server: Running) -> None:
    assert "traceresponse" not in server.post("/embed", {"inputs": "a"}, headers=TRACEPARENT).headers


def test_an_unreachable_collector_costs_spans_and_no_request(
    start_server: Start, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.close()
    server = start_server(otlp_endpoint=collector.url)
    assert all(server.post("/embed", {"inputs": "a"}).status_code == 200 for _ in range(3))
    server.stop()
    address = collector.url.removeprefix("http://")
    assert f"12 spans were lost: they could not be sent to {address}/v1/traces: Connection refused" in caplog.text


def test_a_stalled_collector_holds_up_nothing_and_few_spans_wait_for_it(
    start_server: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.hold.clear()
    server = start_server(otlp_endpoint=collector.url)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.post("/embed", {"inputs": "a"}).status_code, range(20)))
    assert answers == [200] * 20
    server.stop()  # ends while the collector stalls
    collector.hold.set()
    assert len(collector.spans()) <= 4 + 8


def test_a_missing_package_is_named(served_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sbert_infer.serve.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    result = CliRunner().invoke(main, [str(served_onnx), "--port", "0", "--otlp-endpoint", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "opentelemetry is not installed" in result.output
    assert "pip install 'sbert-infer[otel]'" in result.output


def test_a_bad_endpoint_is_named_before_a_model_is_opened(tmp_path: Path) -> None:
    (tmp_path / "no.onnx").write_bytes(b"")
    result = CliRunner().invoke(main, [str(tmp_path / "no.onnx"), "--port", "0", "--otlp-endpoint", "collector"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "error: --otlp-endpoint is no address of a collector such as http://localhost:4318" in result.output


@pytest.fixture(autouse=True)
def _log_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
