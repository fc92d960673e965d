"""langchain-nvidia-ai-endpoints: what it sends to a NIM, for embeddings and for reranking."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import sys

from langchain_core.documents import Document
from langchain_nvidia_ai_endpoints import NVIDIAEmbeddings, NVIDIARerank

given = json.load(sys.stdin)
server = {"base_url": given["url"] + "/v1", "api_key": given["key"]}
texts = given["texts"]

embedder = NVIDIAEmbeddings(model=given["model"], truncate="END", **server)
found = {"query": [embedder.embed_query(text) for text in texts], "document": embedder.embed_documents(texts)}
short = NVIDIAEmbeddings(model=given["model"], dimensions=8, **server).embed_documents(texts)
refusal = ""
try:
    NVIDIAEmbeddings(model=given["model"], truncate="NONE", **server).embed_query("word " * 500)
except Exception as error:
    refusal = str(error)
reranker = NVIDIARerank(model=given["reranker"], top_n=2, truncate="END", **server)
ranked = reranker.compress_documents(query=given["query"], documents=[Document(page_content=text) for text in texts])
ranks = [{"text": item.page_content, "logit": item.metadata["relevance_score"]} for item in ranked]
print(json.dumps({"vectors": found, "short": short, "refusal": refusal, "ranks": ranks}))
