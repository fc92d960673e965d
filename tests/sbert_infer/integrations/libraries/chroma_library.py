"""Chroma: a collection on disk, opened again with the function that it has written down."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import chromadb

from sbert_infer.integrations.chroma import SbertEmbeddingFunction
from tests.sbert_infer.integrations.libraries.given import FEW, FOLDER, MINILM, PROMPTED, QUERY, TEXTS, prompted, same

function = SbertEmbeddingFunction(PROMPTED, truncate_dim=8)
for each in (function, SbertEmbeddingFunction.build_from_config(function.get_config())):
    same(each(FEW), prompted.encode_document(FEW, truncate_dim=8))
    same(each.embed_query([QUERY]), prompted.encode_query([QUERY], truncate_dim=8))
assert not function.is_legacy()

client = chromadb.PersistentClient(str(FOLDER))
dots = client.create_collection("dots", embedding_function=function)
assert dots.configuration_json["hnsw"]["space"] == "ip"
dots.add(ids=[str(index) for index in range(len(FEW))], documents=FEW)
found = dots.query(query_texts=[QUERY], n_results=3, include=["distances"])
scores = prompted.encode_document(FEW, truncate_dim=8) @ prompted.encode_query(QUERY, truncate_dim=8)
assert found["ids"][0] == [str(index) for index in (-scores).argsort()[:3]]

client.create_collection("texts", embedding_function=SbertEmbeddingFunction(MINILM)).add(
    ids=[str(index) for index in range(len(TEXTS))], documents=TEXTS
)
chromadb.api.shared_system_client.SharedSystemClient.clear_system_cache()  # as another process finds it
texts = chromadb.PersistentClient(str(FOLDER)).get_collection("texts")
assert texts.configuration_json["hnsw"]["space"] == "cosine"
found = texts.query(query_texts=["how do I cook noodles?"], n_results=3)
assert all("pasta" in text for text in found["documents"][0]), found
