"""dspy: the method itself is an embedder, in a retriever over texts."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio

import dspy

from tests.sbert_infer.integrations.libraries.given import FEW, QUERY, TEXTS, minilm, prompted, same

embedder = dspy.Embedder(minilm.encode)
same(embedder(FEW), minilm.encode(FEW))
same(embedder(QUERY), minilm.encode(QUERY))
same(asyncio.run(embedder.acall(FEW)), minilm.encode(FEW))
same(dspy.Embedder(prompted.encode_query)(QUERY), prompted.encode_query(QUERY))

search = dspy.retrievers.Embeddings(corpus=TEXTS, embedder=embedder, k=3)
assert all("pasta" in text for text in search("how do I cook noodles?").passages)
