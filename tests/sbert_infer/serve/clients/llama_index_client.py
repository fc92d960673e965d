"""llama-index with text-embeddings-inference: batches of 128, sync and async, and a long text."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import json
import sys

from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

given = json.load(sys.stdin)
texts = [text for text in given["texts"] if text]  # in this dialect, an empty text is an error
embedder = TextEmbeddingsInference(
    model_name=given["model"], base_url=given["url"], auth_token=given["key"], embed_batch_size=128
)
found = {
    "documents": embedder.get_text_embedding_batch(texts),
    "queries": [embedder.get_query_embedding(text) for text in texts[:3]],
    "async": asyncio.run(embedder.aget_text_embedding_batch(texts)),
}
print(json.dumps({"vectors": found, "long": embedder.get_text_embedding("word " * 5000)}))
