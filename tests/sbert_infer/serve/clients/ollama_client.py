"""ollama: embed and the older embeddings."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import sys
from typing import Any

import ollama

given = json.load(sys.stdin)
client = ollama.Client(host=given["url"], headers={"Authorization": f"Bearer {given['key']}"})
model, texts = given["model"], given["texts"]

answer = client.embed(model=f"{model}:latest", input=texts, options={"num_ctx": 512}, keep_alive="5m")
one = client.embed(model=model, input=texts[0], dimensions=8)
long = client.embed(model=model, input="word " * 500)
older = [list(client.embeddings(model=model, prompt=text).embedding) for text in texts]


def refusal(name: str, **options: Any) -> list[Any]:
    try:
        client.embed(model=name, input="word " * 500, **options)
    except ollama.ResponseError as error:
        return [error.status_code, error.error]
    return []


refusals = [refusal("unknown"), refusal(model, truncate=False)]
print(
    json.dumps(
        {
            "vectors": [list(row) for row in answer.embeddings],
            "tokens": answer.prompt_eval_count,
            "short": list(one.embeddings[0]),
            "long": list(long.embeddings[0]),
            "older": older,
            "refusals": refusals,
        }
    )
)
