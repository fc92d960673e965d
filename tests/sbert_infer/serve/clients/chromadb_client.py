"""chromadb: its embedding functions for OpenAI and for text-embeddings-inference."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import sys

from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction
from chromadb.utils.embedding_functions.huggingface_embedding_function import HuggingFaceEmbeddingServer

given = json.load(sys.stdin)
texts = [text for text in given["texts"] if text]  # chromadb takes no empty document
openai = OpenAIEmbeddingFunction(api_key=given["key"], api_base=given["url"] + "/v1", model_name=given["model"])
tei = HuggingFaceEmbeddingServer(url=given["url"] + "/embed", api_key=given["key"])
found = {
    "openai": [vector.tolist() for vector in openai(texts)],
    "tei": [vector.tolist() for vector in tei(texts)],
    "queries": [vector.tolist() for vector in openai.embed_query(texts[:3])],
}
print(json.dumps({"vectors": found}))
