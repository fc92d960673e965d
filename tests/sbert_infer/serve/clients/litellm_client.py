"""litellm: the prefixes openai/ and huggingface/, sync and async."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

given = json.load(sys.stdin)
texts = given["texts"]
openai = {"model": f"openai/{given['model']}", "api_base": given["url"] + "/v1", "api_key": given["key"]}


def vectors(answer: Any) -> list[list[float]]:
    return [item["embedding"] for item in answer.data]


found = {
    "default": vectors(litellm.embedding(**openai, input=texts)),
    "float": vectors(litellm.embedding(**openai, input=texts, encoding_format="float")),
    "async": vectors(asyncio.run(litellm.aembedding(**openai, input=texts))),
}
unknown = None
try:
    litellm.embedding(**{**openai, "model": "openai/unknown"}, input=texts)
except litellm.NotFoundError as error:
    unknown = str(error)
print(json.dumps({"vectors": found, "unknown": unknown}))
