"""Vectors as JSON. Large responses are made in pieces, and other requests run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from sbert_infer.encode.sparse import SparseRows
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.schemas import SparseValue

Vectors = npt.NDArray[np.float32]

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_encoder = msgspec.json.Encoder()
_PIECE_NUMBERS = 64 * 384  # some 3 ms
_MOST_AT_ONCE = 4  # arrays of several pieces: each adds a piece to the time until others run
_PIECE_SPARSE_NUMBERS = 8192  # some 3 ms
_MAX_SPARSE_NUMBERS = 2**21  # in one response: some 60 MB of JSON. Trained models give a few hundred per text
_DIGITS = 9  # enough to tell every float32 from its neighbours


def json_response(content: object, headers: dict[str, str] | None = None) -> Response:
    """Make a response of status 200."""
    return _JsonResponse(_encoder.encode(content), headers or {})


class _JsonResponse(Response):
    """Starlette's response with cheaper headers: its own take as long as a few vectors."""

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        self.status_code, self.background, self.body = 200, None, body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        self.raw_headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def json_array(vectors: Vectors, items: Callable[[int, Vectors], list[object]]) -> msgspec.Raw:
    """Encode vectors, [texts, dim], as a JSON array of what `items(start, rows)` gives."""
    if not np.isfinite(vectors).all():  # would become null
        raise ArithmeticError("a vector is not finite")
    rows = max(1, _PIECE_NUMBERS // vectors.shape[1])
    if len(vectors) <= rows:
        return msgspec.Raw(_encoder.encode(items(0, vectors)))
    pieces = []
    async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MOST_AT_ONCE)):
        for start in range(0, len(vectors), rows):
            await asyncio.sleep(0)
            pieces.append(_encoder.encode(items(start, vectors[start : start + rows]))[1:-1])
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


async def sparse_json_array(rows: SparseRows) -> msgspec.Raw:
    """Encode sparse vectors as a JSON array of lists of `SparseValue`."""
    if (numbers := sum(len(values) for _, values in rows)) > _MAX_SPARSE_NUMBERS:
        message = (
            f"the vectors have {numbers} active dimensions, at most {_MAX_SPARSE_NUMBERS} are sent at once: send fewer"
        )
        raise Problem("too_many_inputs", message, param="inputs")
    pieces, size = [], 0
    for dims, values in rows:
        size += len(dims)
        if size > _PIECE_SPARSE_NUMBERS:
            await asyncio.sleep(0)
            size = 0
        numbered = zip(dims.tolist(), as_numbers(values[None])[0], strict=True)
        pieces.append(_encoder.encode([SparseValue(index, value) for index, value in numbered]))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


def as_numbers(vectors: Vectors) -> list[list[float]]:
    """The shortest numbers that give the same float32: a third shorter than float64's."""
    wide = vectors.astype(np.float64)
    magnitude = np.floor(np.log10(np.maximum(np.abs(wide), 1e-45)))
    scale = 10.0 ** (_DIGITS - 1 - magnitude)
    numbers: list[list[float]] = (np.round(wide * scale) / scale).tolist()
    return numbers
