"""A server that speaks OpenAI's contract (`/v1/embeddings`) or TEI's (`/embed`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.fingerprint import Fingerprint
from sbert_infer.errors import SbertInferError
from sbert_infer.verify.truth import Stated

Array = npt.NDArray[np.float32]

_OPENAI, _TEI = "/v1/embeddings", "/embed"
_FINGERPRINT = "x-model-fingerprint"  # a header of sbert-serve
_BATCH = 8  # texts in a request
_TIMEOUT_S = 120.0


class ServerError(SbertInferError):
    """A server that does not answer, or not with vectors. `status` is that of HTTP, 0 for none."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: they would take the key elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """Asks a server for vectors. `url` is its root, or the whole address of a route."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, normalize: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{url!r} is no address of a server, such as http://127.0.0.1:8080")
        path = parts.path.rstrip("/")
        known = next((route for route in (_OPENAI, _TEI) if path.endswith(route)), None)
        self.route = known  # None until the server has answered on one
        self._root = urlunsplit((parts.scheme, parts.netloc, path.removesuffix(known or ""), "", ""))
        self._model, self._key, self._normalize = model, key, normalize
        self._fingerprint: str | None = None  # that it says its vectors have
        self._opener = build_opener(_NoRedirects)

    def stated(self) -> Stated | None:
        """Return the fingerprint that came with vectors, with the parts that `/info` has for it."""
        if self._fingerprint is None:
            return None
        try:
            cards = {card["fingerprint"]: card["fingerprint_parts"] for card in self._request("/info")["models"]}
            return Stated(self._fingerprint, Fingerprint.from_json(json.dumps(cards[self._fingerprint])))
        except (ServerError, LookupError, TypeError, ValueError):
            return Stated(self._fingerprint, None)

    def encode(self, texts: Sequence[str]) -> Array:
        """Return the server's vectors, [texts, dim]."""
        rows: list[Any] = []
        for start in range(0, len(texts), _BATCH):
            rows += self._ask(list(texts[start : start + _BATCH]))
        try:
            vectors = np.array(rows, np.float32)
        except (ValueError, TypeError):
            vectors = np.empty(0, np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ServerError(f"{self._root}{self.route} gave no list of vectors for {len(texts)} texts")
        return vectors

    def _ask(self, texts: list[str]) -> list[Any]:
        if self.route is None:
            try:
                found, self.route = self._ask_on(_OPENAI, texts), _OPENAI
                return found
            except ServerError as error:
                if error.status not in (404, 405):
                    raise
                self.route = _TEI
        return self._ask_on(self.route, texts)

    def _ask_on(self, route: str, texts: list[str]) -> list[Any]:
        if route == _TEI:
            rows = self._request(route, {"inputs": texts, "normalize": self._normalize, "truncate": True})
            return rows if isinstance(rows, list) else []  # which `encode` refuses: they are too few
        self._model = self._model or self._first_model()
        body: dict[str, Any] = {"input": texts, "encoding_format": "float"}
        answer = self._request(route, {**body, "model": self._model} if self._model else body)
        try:
            rows = sorted(answer["data"], key=lambda entry: entry["index"])
            return [entry["embedding"] for entry in rows]
        except (TypeError, KeyError) as error:
            raise ServerError(f"{self._root}{route} did not answer as OpenAI does: no {error}") from error

    def _first_model(self) -> str | None:
        """Return the name of the only or first model; None if the server does not tell."""
        try:
            return str(self._request("/v1/models")["data"][0]["id"])
        except (ServerError, KeyError, IndexError, TypeError):
            return None

    def _request(self, route: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._root + route, data, headers)  # noqa: S310  # http and https only, as checked
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                self._fingerprint = response.headers.get(_FINGERPRINT) or self._fingerprint
                return json.load(response)
        except HTTPError as error:
            said = " ".join(error.read(300).decode("utf-8", "replace").split())
            message = f"{self._root}{route} answered {error.code}: {said or error.reason}"
            raise ServerError(message, error.code) from error
        except (URLError, OSError) as error:
            raise ServerError(f"{self._root} can't be reached: {getattr(error, 'reason', error)}") from error
        except HTTPException as error:
            raise ServerError(f"{self._root}{route} did not answer as HTTP does: {error}") from error
        except ValueError as error:
            raise ServerError(f"{self._root}{route} did not answer with JSON") from error
