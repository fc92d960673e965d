"""LlamaIndex: SbertEmbedding in an in-memory index."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio

from llama_index.core import Document, VectorStoreIndex

from sbert_infer.integrations.llama_index import SbertEmbedding
from tests.sbert_infer.integrations.libraries.given import FEW, MINILM, PROMPTED, QUERY, TEXTS, prompted, same

embedding = SbertEmbedding(PROMPTED, options={"truncate_dim": 8})
queries, documents = prompted.encode_query(QUERY, truncate_dim=8), prompted.encode_document(FEW, truncate_dim=8)
for each in (embedding, SbertEmbedding.from_dict(embedding.to_dict()), SbertEmbedding.from_json(embedding.to_json())):
    same(each.get_query_embedding(QUERY), queries)
    same(each.get_text_embedding_batch(FEW), documents)
    same(each.get_text_embedding(FEW[0]), documents[0])
    same(asyncio.run(each.aget_query_embedding(QUERY)), queries)
    same(asyncio.run(each.aget_text_embedding(FEW[0])), documents[0])
    same(asyncio.run(each.aget_text_embedding_batch(FEW)), documents)

written = SbertEmbedding(prompted)
same(written.get_query_embedding(QUERY), prompted.encode_query(QUERY))
try:
    SbertEmbedding.from_dict(written.to_dict())
except Exception as error:
    assert "an open engine" in str(error), error  # noqa: PT017
else:
    raise AssertionError("an engine's path and settings can't be read from this dictionary")

index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=SbertEmbedding(MINILM))
found = index.as_retriever(similarity_top_k=3).retrieve("how do I cook noodles?")
assert all("pasta" in node.text for node in found), found
