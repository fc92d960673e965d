"""litellm: its providers for vLLM, Infinity, Ollama, NIM, Jina, Voyage, Cohere and TEI."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import sys
from typing import Any

import litellm

given = json.load(sys.stdin)
texts = given["texts"]


def embed(provider: str, base: str, url: str = given["url"], **options: Any) -> list[list[float]]:
    """The vectors that a provider gets at `base`."""
    model = f"{provider}/{given['model']}"
    answer = litellm.embedding(model=model, api_base=url + base, api_key=given["key"], input=texts, **options)
    return [item["embedding"] for item in answer.data]


def rerank(provider: str) -> list[dict[str, Any]]:
    """The best two documents."""
    return litellm.rerank(  # type: ignore[no-any-return]
        model=f"{provider}/{given['reranker']}",
        api_base=given["url"],
        api_key=given["key"],
        query=given["query"],
        documents=texts,
        top_n=2,
        return_documents=True,
    ).results


vectors = {
    "plain": {
        "hosted_vllm": embed("hosted_vllm", "/v1", encoding_format="float"),
        "infinity": embed("infinity", "/v1", modality="text", encoding_format="float"),
        "ollama": embed("ollama", "", given["open_url"]),  # which sends no key
    },
    "query": {
        "nvidia_nim": embed("nvidia_nim", "/v1", input_type="query"),
        "jina_ai": embed("jina_ai", "/v1", task="retrieval.query"),
        "voyage": embed("voyage", "/v1", input_type="query"),
        "cohere": embed("cohere", "/v2/embed", input_type="search_query"),
    },
    "document": {
        "nvidia_nim": embed("nvidia_nim", "/v1", input_type="passage", truncate="END"),
        "cohere": embed("cohere", "/v2/embed", input_type="search_document", encoding_format="float"),
    },
}
short = {
    "jina_ai": embed("jina_ai", "/v1", dimensions=8),
    "voyage": embed("voyage", "/v1", dimensions=8),
    "cohere": embed("cohere", "/v2/embed", dimensions=8, input_type="classification"),
}
ranks = {provider: rerank(provider) for provider in ("cohere", "jina_ai", "hosted_vllm", "voyage", "huggingface")}
print(json.dumps({"vectors": vectors, "short": short, "ranks": ranks}))
