"""A server under load: its address and model, the requests to it, the vectors in responses."""

from __future__ import annotations

import base64
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.errors import BenchError
from sbert_infer.bench.stats import cosines

Vectors = npt.NDArray[np.float32]

_NAMED_URL = re.compile(r"(?:(?P<name>[^=/]+)=)?(?P<url>https?://.+)")
_POLL_S = 0.2
_ADVICE = {
    401: "set --api-key or OPENAI_API_KEY",
    404: "give the whole URL of its embeddings route, or name its model with --model",
}


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server."""

    name: str
    url: str  # of the embeddings route
    model: str = ""
    api_key: str = field(default="", repr=False)
    pid: int | None = None

    @property
    def secure(self) -> bool:
        """Whether it is reached over TLS."""
        return self.url.startswith("https:")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if self.secure else 80)

    def request(self, texts: Sequence[str], encoding_format: str) -> bytes:
        """Build the bytes of an HTTP request for the vectors of `texts`."""
        parts = urlsplit(self.url)
        content = {"model": self.model, "encoding_format": encoding_format, "input": list(texts)}
        body = json.dumps(content, ensure_ascii=False).encode()
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {self.api_key}"] if self.api_key else []
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    def wait(self, seconds: float) -> None:
        """Wait until the server accepts connections, for `seconds` at most."""
        end = time.monotonic() + seconds
        while True:
            try:
                return socket.create_connection(self.address, timeout=5).close()
            except OSError as error:
                if time.monotonic() >= end:
                    problem = error.strerror or error
                    raise BenchError(f"{self.url} can't be reached ({problem}): is it running? see --wait") from error
            time.sleep(_POLL_S)

    def first_model(self) -> str:
        """Ask the server for the first model that it lists."""
        url = self.url.removesuffix("/embeddings") + "/models"
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http or https, by parse_target
            with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
                return str(json.load(response)["data"][0]["id"])
        except urllib.error.HTTPError as error:
            advice = _ADVICE.get(error.code, "name its model with --model")
            raise BenchError(f"{url} responded with {error.code}: {advice}") from error
        except OSError as error:
            raise BenchError(f"{url} can't be read: {getattr(error, 'reason', error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{url} does not list models as OpenAI does: name one with --model") from error


def is_url(text: str) -> bool:
    """Whether `text` names a server: `URL` or `NAME=URL`."""
    return _NAMED_URL.fullmatch(text) is not None


def parse_target(text: str) -> Target:
    """Parse `URL` or `NAME=URL`; like OpenAI, add /v1 if there is no path, then /embeddings."""
    match = _NAMED_URL.fullmatch(text)
    parts = urlsplit(match["url"]) if match else None
    try:
        known = parts is not None and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # the port is not a number
        known = False
    if match is None or parts is None or not known:
        raise BenchError(f"--serve {text} is not a URL such as http://127.0.0.1:8080")
    path = parts.path.rstrip("/") or "/v1"
    path = path if path.endswith("/embeddings") else f"{path}/embeddings"
    return Target(match["name"] or parts.netloc.rpartition("@")[2], parts._replace(path=path, fragment="").geturl())


def decode_response(body: bytes) -> Vectors | None:
    """Decode an OpenAI response into vectors [texts, dim] in input order; None if it isn't one."""
    try:
        entries = sorted(json.loads(body)["data"], key=lambda entry: int(entry["index"]))
        if [entry["index"] for entry in entries] != list(range(len(entries))):
            return None
        vectors = np.array([_decode_vector(entry["embedding"]) for entry in entries])
    except (ValueError, LookupError, TypeError):
        return None
    return vectors if vectors.ndim == 2 else None


def count_wrong(body: bytes, texts: Sequence[int], expected: Vectors, min_cosine: float) -> int:
    """Count the texts of a request, given as rows of `expected`, that got a wrong vector."""
    vectors = decode_response(body)
    if vectors is None or vectors.shape != (len(texts), expected.shape[1]):
        return len(texts)
    right = cosines(vectors, expected[list(texts)]) >= min_cosine  # NaN is not right
    return len(texts) - int(np.count_nonzero(right))


def _decode_vector(embedding: Any) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    return np.asarray(embedding, np.float32)


def memory_mb(pid: int) -> float:
    """Memory that a process and its children hold now, in MB."""
    parents, sizes = {}, {}
    for file in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in file.read_text(errors="replace").splitlines())
        except OSError:
            continue  # it has just ended
        number = int(file.parent.name)
        parents[number] = int(fields["PPid"])
        sizes[number] = int(fields.get("VmRSS", "0 kB").split()[0]) * 1024 / 1e6
    if pid not in parents:
        raise BenchError(f"--pid {pid}: there is no such process in /proc")
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sizes[member] for member in family)
