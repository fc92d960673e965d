"""What all responses together may hold while their clients read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sbert_infer.serve.http.body_memory import BodyMemory

BODY = bytes(range(256)) * 400


class Client:
    """Reads a response only when told to."""

    def __init__(self, memory: BodyMemory) -> None:
        self.reads, self.gone = asyncio.Event(), False
        self.messages: list[Any] = []
        self.task = asyncio.create_task(memory({"type": "http", "sbert.abort": self.abort}, self.wait, self.send))  # type: ignore[arg-type]

    def abort(self) -> None:
        self.gone = True
        self.reads.set()

    async def wait(self) -> None:
        await self.reads.wait()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if not self.gone:
            self.messages.append(message)


def test_the_oldest_of_those_that_do_not_read_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbert_infer.serve.http.body_memory._UNREAD_BYTES", 2 * len(BODY))

    async def run() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.body", "body": BODY, "more_body": False})

        memory = BodyMemory(app, 1)
        clients = []
        for _ in range(4):
            clients.append(Client(memory))
            await asyncio.sleep(0)
        assert [client.gone for client in clients] == [True, True, False, False]
        for client in clients:
            client.reads.set()
        await asyncio.gather(*(client.task for client in clients))
        assert [b"".join(part["body"] for part in client.messages) for client in clients] == [b"", b"", BODY, BODY]
        assert [part["more_body"] for part in clients[3].messages] == [True, True, False]
        monkeypatch.setattr("sbert_infer.serve.http.body_memory._UNREAD_BYTES", 1)
        alone = Client(memory)
        alone.reads.set()
        await alone.task
        assert not alone.gone

    asyncio.run(run())
