"""LangChain: SbertEmbeddings in an in-memory store."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio

from langchain_core.vectorstores import InMemoryVectorStore

from sbert_infer.integrations.langchain import SbertEmbeddings
from tests.sbert_infer.integrations.libraries.given import FEW, MINILM, PROMPTED, QUERY, TEXTS, pickled, prompted, same

for embeddings in (SbertEmbeddings(PROMPTED), SbertEmbeddings(prompted)):
    same(embeddings.embed_documents(FEW), prompted.encode_document(FEW))
    same(embeddings.embed_query(QUERY), prompted.encode_query(QUERY))
    same(asyncio.run(embeddings.aembed_documents(FEW)), prompted.encode_document(FEW))
    same(asyncio.run(embeddings.aembed_query(QUERY)), prompted.encode_query(QUERY))
    same(pickled(embeddings).embed_query(QUERY), prompted.encode_query(QUERY))
same(SbertEmbeddings(PROMPTED, truncate_dim=8).embed_query(QUERY), prompted.encode_query(QUERY, truncate_dim=8))
assert SbertEmbeddings(PROMPTED).engine is SbertEmbeddings(PROMPTED).engine

store = InMemoryVectorStore.from_texts(TEXTS, SbertEmbeddings(MINILM))
found = store.as_retriever(search_kwargs={"k": 3}).invoke("how do I cook noodles?")
assert all("pasta" in document.page_content for document in found), found
