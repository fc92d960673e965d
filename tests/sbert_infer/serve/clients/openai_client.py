"""openai: both formats, sync and async, one text and many."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai

given = json.load(sys.stdin)
server = {"base_url": given["url"] + "/v1", "api_key": given["key"]}
model, texts = given["model"], given["texts"]


def vectors(answer: Any) -> list[list[float]]:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    assert answer.usage.total_tokens >= len(answer.data)
    return [item.embedding for item in answer.data]


async def in_parallel() -> list[list[float]]:
    async with openai.AsyncOpenAI(**server) as client:
        answers = await asyncio.gather(*(client.embeddings.create(model=model, input=text) for text in texts))
    return [vector for answer in answers for vector in vectors(answer)]


with openai.OpenAI(**server) as client:
    found = {
        "default": vectors(client.embeddings.create(model=model, input=texts)),
        "float": vectors(client.embeddings.create(model=model, input=texts, encoding_format="float")),
        "async": asyncio.run(in_parallel()),
    }
    short = vectors(client.embeddings.create(model=model, input=texts, dimensions=64))
    names = [client.models.retrieve(listed.id).id for listed in client.models.list()]
    packed = client.embeddings.create(model=model, input=texts[0], encoding_format="base64").data[0].embedding

print(json.dumps({"version": openai.__version__, "vectors": found, "short": short, "names": names, "packed": packed}))
