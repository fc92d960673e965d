"""cohere: embeddings of all types and reranking, with both versions of its client."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import sys
from typing import Any

import cohere

given = json.load(sys.stdin)
server = {"api_key": given["key"], "base_url": given["url"]}
model, texts = given["model"], given["texts"]
new, old = cohere.ClientV2(**server), cohere.Client(**server)

types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
found = new.embed(
    model=model, texts=texts, input_type="search_query", embedding_types=types, truncate="NONE"
).embeddings
by_type: dict[str, Any] = {name: getattr(found, "float_" if name == "float" else name) for name in types}
short = new.embed(
    model=model, texts=texts, input_type="search_document", embedding_types=["float"], output_dimension=8, priority=5
).embeddings.float_
plain = old.embed(model=model, texts=texts, input_type="search_document").embeddings
ranking = {"model": given["reranker"], "query": given["query"], "documents": texts, "top_n": 2}
ranks = {
    "new": [item.dict() for item in new.rerank(**ranking, priority=5).results],
    "old": [item.dict() for item in old.rerank(**ranking, return_documents=True).results],
}
refusal = {}
try:
    new.embed(model="unknown", texts=texts, input_type="search_query", embedding_types=["float"])
except cohere.NotFoundError as error:
    refusal = error.body
print(json.dumps({"by_type": by_type, "short": short, "plain": plain, "ranks": ranks, "refusal": refusal}))
