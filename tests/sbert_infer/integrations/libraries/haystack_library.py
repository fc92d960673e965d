"""Haystack: both embedders, in pipelines that are written down and read again."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio

from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.components.writers import DocumentWriter
from haystack.document_stores.in_memory import InMemoryDocumentStore

from sbert_infer.errors import EngineError
from sbert_infer.integrations.haystack import SbertDocumentEmbedder, SbertTextEmbedder
from tests.sbert_infer.integrations.libraries.given import FEW, MINILM, PROMPTED, QUERY, TEXTS, prompted, same

queries = SbertTextEmbedder(PROMPTED, truncate_dim=8)
same(queries.run(QUERY)["embedding"], prompted.encode_query(QUERY, truncate_dim=8))
same(asyncio.run(queries.run_async(QUERY))["embedding"], prompted.encode_query(QUERY, truncate_dim=8))
same(SbertTextEmbedder(prompted).run(QUERY)["embedding"], prompted.encode_query(QUERY))

given = [Document(content=text, meta={"title": f"title {index}"}) for index, text in enumerate(FEW)]
titled = [f"title {index} - {text}" for index, text in enumerate(FEW)]
documents = SbertDocumentEmbedder(PROMPTED, ["title"], " - ", truncate_dim=8)
read = SbertDocumentEmbedder.from_dict(documents.to_dict())
expected = prompted.encode_document(titled, truncate_dim=8)
for embedded in (documents.run(given), read.run(given), asyncio.run(documents.run_async(given))):
    same([document.embedding for document in embedded["documents"]], expected)
    assert [document.content for document in embedded["documents"]] == FEW
assert all(document.embedding is None for document in given)
assert documents.run([]) == {"documents": []}
try:
    SbertTextEmbedder(prompted).to_dict()
except EngineError as error:
    assert "path" in str(error)  # noqa: PT017
else:
    raise AssertionError("an open engine can't be written down")

store = InMemoryDocumentStore(embedding_similarity_function="cosine")
indexing = Pipeline()
indexing.add_component("embedder", SbertDocumentEmbedder(MINILM))
indexing.add_component("writer", DocumentWriter(store))
indexing.connect("embedder", "writer")
again = Pipeline.loads(indexing.dumps(), allowed_modules=["sbert_infer.integrations.haystack"])
assert again.to_dict() == indexing.to_dict()
indexing.run({"embedder": {"documents": [Document(content=text) for text in TEXTS]}})
search = Pipeline()
search.add_component("embedder", SbertTextEmbedder(MINILM))
search.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3))
search.connect("embedder.embedding", "retriever.query_embedding")
found = search.run({"embedder": {"text": "how do I cook noodles?"}})["retriever"]["documents"]
assert all("pasta" in document.content for document in found), found
