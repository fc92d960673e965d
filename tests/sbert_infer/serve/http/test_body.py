"""Bodies that are made to keep the event loop busy."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

from sbert_infer.serve.http import body as reading
from sbert_infer.serve.http.body import decode, read_body
from sbert_infer.serve.routes import handle
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.schemas import EmbedRequest

MB = 2**20
SETTINGS = Settings(models=())
EMPTY = gzip.compress(b"", mtime=0)


class Upload:
    """A request whose body comes in chunks, all of which are there."""

    def __init__(self, body: bytes, chunk: int = 2**18) -> None:
        self.chunks = [body[start : start + chunk] for start in range(0, len(body), chunk)]
        headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]
        memory = SimpleNamespace(free_bytes=100 * MB)
        self.scope: dict[str, Any] = {"headers": headers, "sbert.has_come": True}
        self.scope |= {"sbert.body_memory": memory, "sbert.reserved_bytes": 0}

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": self.chunks.pop(0), "more_body": bool(self.chunks)}


def read(body: bytes) -> tuple[bytes | Problem, int]:
    """Read a body, and count how often another task got its turn meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> bytes | Problem:
        other = asyncio.ensure_future(others())
        try:
            return await read_body(Upload(body), SETTINGS)  # type: ignore[arg-type]
        except Problem as problem:
            return problem
        finally:
            other.cancel()

    return asyncio.run(main()), turns


def test_thousands_of_empty_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0

    class Counted:
        def __init__(self, wbits: int) -> None:
            self._member = zlib.decompressobj(wbits)

        def decompress(self, data: bytes, most: int) -> bytes:
            nonlocal copied
            copied += len(data)
            return self._member.decompress(data, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._member, name)

    monkeypatch.setattr(reading, "zlib", SimpleNamespace(decompressobj=Counted, error=zlib.error))
    refused, turns = read(EMPTY * (4 * MB // len(EMPTY)))
    assert isinstance(refused, Problem)
    assert refused.code == "invalid_json"
    assert "more than 1024 gzip members" in refused.message
    assert copied < 20 * MB  # it was 500 MB of the first chunk alone
    assert turns > 1000


def test_a_body_of_some_members_is_read() -> None:
    text = json.dumps({"inputs": "a" * 70_000}).encode()
    parts = [text[start : start + 100] for start in range(0, len(text), 100)]
    found, _ = read(b"".join(gzip.compress(part) + EMPTY * (number % 2) for number, part in enumerate(parts[:600])))
    assert found == b"".join(parts[:600])


def test_others_get_their_turn_while_nothing_comes_out_of_a_body() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = packer.compress(b"{}") + packer.flush(zlib.Z_FULL_FLUSH)
    body += b"\0\0\0\xff\xff" * (2 * MB // 5)  # blocks without content
    found, turns = read(body + packer.flush())
    assert found == b"{}"
    assert turns > len(body) // 2**15


def test_others_get_their_turn_while_much_comes_out_of_a_body() -> None:
    found, turns = read(gzip.compress(b" " * 15 * MB))
    assert found == b" " * 15 * MB
    assert turns > 50


class Bounded:
    """A pattern that is searched for in a part of a body only."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def search(self, body: bytes, start: int = 0, stop: int | None = None) -> Any:
        assert stop is not None
        assert stop - start <= MB
        return self._pattern.search(body, start, stop)


def test_what_is_wrong_with_a_body_is_not_searched_for_in_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SURROGATE", Bounded(reading._SURROGATE))
    monkeypatch.setattr(handle, "_IDS", Bounded(handle._IDS))
    with pytest.raises(Problem, match="the body is not JSON"):
        decode(b'{"inputs": "' + b"\\" * (15 * MB), EmbedRequest)
    with pytest.raises(Problem, match="half a character"):
        decode(b'{"inputs": "\\ud800"}', EmbedRequest)
    with pytest.raises(Problem, match="Expected"):
        handle.decode_inputs(b'{"inputs": [' + b" " * (15 * MB) + b'"a", 5]}', EmbedRequest, EmbedRequest, False)
    with pytest.raises(Problem, match="token ids are not accepted"):
        handle.decode_inputs(b'{"inputs": [ [5]]}', EmbedRequest, EmbedRequest, False)
