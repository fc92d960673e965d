"""voyageai: embeddings for queries and documents, in bytes and bits, and reranking."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import sys

import voyageai

given = json.load(sys.stdin)
client = voyageai.Client(api_key=given["key"], base_url=given["url"] + "/v1")
model, texts = given["model"], given["texts"]

vectors = {kind: client.embed(texts, model=model, input_type=kind).embeddings for kind in ("query", "document")}
types = {
    kind: client.embed(texts, model=model, input_type="query", output_dtype=kind).embeddings
    for kind in ("int8", "uint8", "binary", "ubinary")
}
short = client.embed(texts, model=model, output_dimension=8).embeddings
ranks = [item._asdict() for item in client.rerank(given["query"], texts, model=given["reranker"], top_k=2).results]
refusal = ""
try:
    client.embed(["word " * 500], model=model, truncation=False)
except voyageai.error.InvalidRequestError as error:
    refusal = str(error)
print(json.dumps({"vectors": vectors, "types": types, "short": short, "ranks": ranks, "refusal": refusal}))
