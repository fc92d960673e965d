"""chonkie: chunks of a text, cut where its topic changes."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio

from chonkie import SemanticChunker

from sbert_infer.integrations.chonkie import SbertEmbeddings
from tests.sbert_infer.integrations.libraries.given import FEW, MINILM, PROMPTED, QUERY, minilm, prompted, same

for embeddings in (SbertEmbeddings(PROMPTED), SbertEmbeddings(prompted)):
    same(embeddings.embed(QUERY), prompted.encode(QUERY))
    same(embeddings.embed_batch(FEW), prompted.encode(FEW))
    same(asyncio.run(embeddings.aembed_batch(FEW)), prompted.encode(FEW))
    one, other = prompted.encode(FEW[:2])
    assert embeddings.similarity(one, other) == prompted.similarity(one, other).item()
    assert embeddings.dimension == prompted.get_embedding_dimension()

about = {
    "pasta": "Boil the pasta in salted water. Fry the onions for the pasta sauce. Serve the pasta with basil. ",
    "Mars": "Mars has two small moons. The orbit of Mars takes two years. A probe landed on Mars and sent pictures. ",
}
text = "".join(about.values())
chunker = SemanticChunker(embedding_model=SbertEmbeddings(MINILM), threshold=0.5, similarity_window=1, chunk_size=200)
chunks = chunker(text)
assert "".join(chunk.text for chunk in chunks) == text
assert len(chunks) > 1
assert not any("pasta" in chunk.text and "Mars" in chunk.text for chunk in chunks), chunks
counts = [len(ids) for ids in minilm.tokenizer([chunk.text for chunk in chunks], add_special_tokens=False)["input_ids"]]
assert all(abs(chunk.token_count - count) <= 2 for chunk, count in zip(chunks, counts, strict=True)), (chunks, counts)
