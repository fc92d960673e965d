"""openai: its client for Azure, and fields of NIM, Jina and vLLM that it is told to send."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import sys
from typing import Any

import openai

given = json.load(sys.stdin)
model, texts = given["model"], given["texts"]
azure = openai.AzureOpenAI(azure_endpoint=given["url"], api_key=given["key"], api_version="2024-10-21")
plain = openai.OpenAI(base_url=given["url"] + "/v1", api_key=given["key"])


def embed(client: Any, name: str = model, **extra: Any) -> Any:
    answer = client.embeddings.create(model=name, input=texts, encoding_format="float", extra_body=extra)
    return [item.embedding for item in answer.data]


found = {
    "plain": {"azure": embed(azure), "vllm": embed(plain, truncate_prompt_tokens=-1)},
    "query": {
        "azure": embed(azure, input_type="query"),
        "by name": embed(plain, f"{model}-query"),
        "nim": embed(plain, input_type="query", truncate="NONE"),
        "jina": embed(plain, task="retrieval.query", normalized=True),
    },
    "document": {"by name": embed(plain, f"{model}-passage"), "nim": embed(plain, input_type="passage")},
}
bits = embed(plain, embedding_type="ubinary")
packed = plain.embeddings.create(
    model=model, input=texts, encoding_format="base64", extra_body={"embedding_type": "int8"}
)
stranger = openai.AzureOpenAI(azure_endpoint=given["url"], api_key="another", api_version="2024-10-21")


def refusal(client: Any, **extra: Any) -> str:
    try:
        embed(client, **extra)
    except (openai.BadRequestError, openai.AuthenticationError) as error:
        return str(error.message)
    return ""


refusals = [
    refusal(plain, input_type="poem"),
    refusal(plain, input_type="query", task="retrieval.passage"),
    refusal(stranger),
]
bytes_ = [item.embedding for item in packed.data]
print(json.dumps({"vectors": found, "bits": bits, "bytes": bytes_, "refusals": refusals}))
