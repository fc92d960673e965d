"""Where traces go: the option, OpenTelemetry's variables, and what is wrong with them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbert_infer.serve.otlp import find_endpoint

BASE, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("option", "variables", "found"),
    [
        (None, {}, "None"),
        (None, {BASE: ""}, "None"),
        (None, {BASE: "http://a:4318"}, "a:4318/v1/traces"),
        (None, {BASE: "https://a/otlp/"}, "a:443/otlp/v1/traces"),
        (None, {BASE: "http://a", TRACES: "http://b:1/x?y=1"}, "b:1/x"),
        (None, {TRACES: "http://b"}, "b:80/"),
        ("http://[::1]:7", {BASE: "http://a"}, "::1:7/v1/traces"),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, "localhost:4318/v1/traces"),
        ("http://a", {"OTEL_TRACES_EXPORTER": "none"}, "None"),
        ("http://a", {"OTEL_SDK_DISABLED": "True"}, "None"),
        ("http://a", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "a:80/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "None"),  # nobody asked for traces
    ],
)
def test_the_option_and_the_variables_name_it(option: str | None, variables: dict[str, str], found: str) -> None:
    assert str(find_endpoint(option, variables)) == found


@pytest.mark.parametrize(
    ("variables", "culprit"),
    [
        ({BASE: "collector:4318"}, BASE),
        ({BASE: "grpc://collector:4317"}, BASE),
        ({BASE: "http://"}, BASE),
        ({BASE: "http://a:99999"}, BASE),
        ({BASE: "http://a..b"}, BASE),
        ({TRACES: "http://user:word@a"}, TRACES),
        ({TRACES: "http://a/b c"}, TRACES),
        ({BASE: "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"),
        ({BASE: "http://a", "OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin'"),
        ({BASE: "http://a", "OTEL_EXPORTER_OTLP_HEADERS": "key"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({BASE: "http://a", "OTEL_EXPORTER_OTLP_HEADERS": "a b=c"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({BASE: "http://a", "OTEL_EXPORTER_OTLP_HEADERS": "a=b%0d%0ac"}, "OTEL_EXPORTER_OTLP_HEADERS"),
        ({BASE: "https://a", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/file"}, "OTEL_EXPORTER_OTLP_CERTIFICATE, /no/file"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(variables: dict[str, str], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit) as caught:
        find_endpoint(None, variables)
    assert "word" not in str(caught.value)


def test_a_certificate_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ValueError, match=r"ca\.pem"):
        find_endpoint("https://a", {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem")})


@given(st.text(), st.text())
def test_any_text_is_an_endpoint_or_an_error(address: str, headers: str) -> None:
    try:
        endpoint = find_endpoint("http://" + address, {"OTEL_EXPORTER_OTLP_HEADERS": headers})
    except ValueError:
        return
    assert endpoint is not None
    assert endpoint.host


def test_what_is_no_http_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"no HTTP\r\n\r\n")

        threading.Thread(target=babble, daemon=True).start()
        endpoint = find_endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", {})
        assert endpoint is not None
        with pytest.raises(OSError, match="no HTTP"):
            endpoint.post(b"")
