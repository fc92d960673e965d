"""Where traces go, as the option or OpenTelemetry's variables say, and how: OTLP over HTTP."""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_FOR_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"  # a whole address; the others lack this path
_PATH = "/v1/traces"
_DEFAULT = "http://localhost:4318"
_PROTOCOL = "http/protobuf"
_TIMEOUT_S = 10.0
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)


@dataclass(frozen=True)
class Endpoint:
    """The address of a collector."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    headers: Mapping[str, str] = field(repr=False)  # may hold a key of the collector

    def __str__(self) -> str:
        return f"{self.host}:{self.port}{self.path.partition('?')[0]}"

    def post(self, message: bytes) -> None:
        """Send an encoded message once, or raise `OSError`."""
        if self.tls is None:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        else:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=_TIMEOUT_S, context=self.tls)
        try:
            connection.request("POST", self.path, message, {**self.headers, "content-type": "application/x-protobuf"})
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP: {error!r}") from None
        finally:
            connection.close()
        if not 200 <= status < 300:
            raise ConnectionError(f"HTTP {status}")


def find_endpoint(option: str | None, environ: Mapping[str, str]) -> Endpoint | None:
    """Find the endpoint that `--otlp-endpoint` or a variable names; None if traces are off."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    base = environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if option is not None:
        name, url = "--otlp-endpoint", option
    elif url := environ.get(_FOR_TRACES, ""):
        name = _FOR_TRACES
    elif base or exporter == "otlp":
        name, url = "OTEL_EXPORTER_OTLP_ENDPOINT", base or _DEFAULT
    else:
        return None
    if exporter not in ("", "otlp"):
        raise ValueError(f"OTEL_TRACES_EXPORTER is {exporter!r}: set it to otlp, or to none for no traces")
    protocol = _for_traces(environ, "PROTOCOL") or _PROTOCOL
    if protocol != _PROTOCOL:
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: set it to {_PROTOCOL}, the only one there is")
    return _parse(name, url, _for_traces(environ, "CERTIFICATE"), _headers(_for_traces(environ, "HEADERS")))


def _for_traces(environ: Mapping[str, str], what: str) -> str:
    """The variable for traces, or else the one for all signals, or nothing."""
    return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{what}") or environ.get(f"OTEL_EXPORTER_OTLP_{what}", "")


def _parse(name: str, url: str, certificate: str, headers: dict[str, str]) -> Endpoint:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = parts.hostname or ""
        host.encode("idna")
        right = parts.scheme in ("http", "https") and bool(host) and parts.username is None
    except ValueError:  # no such port, or no such host
        right = False
    if not right or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"{name} is no address of a collector such as {_DEFAULT}, without a user")
    path = parts.path or "/"
    if name != _FOR_TRACES:
        path = path.removesuffix("/") + _PATH
    path = f"{path}?{parts.query}" if parts.query else path
    return Endpoint(host, port, path, _tls(certificate) if parts.scheme == "https" else None, headers)


def _tls(certificate: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=certificate or None)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"OTEL_EXPORTER_OTLP_CERTIFICATE, {certificate}: {reason}") from None


def _headers(given: str) -> dict[str, str]:
    """Parse `name=value,name=value`, with values as in a URL."""
    headers = {}
    for pair in filter(None, map(str.strip, given.split(","))):
        name, equals, value = pair.partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not equals or not _HEADER.fullmatch(name) or not value.isascii() or not value.isprintable():
            raise ValueError("OTEL_EXPORTER_OTLP_HEADERS must be name=value,name=value, with values as in a URL")
        headers[name] = value
    return headers
