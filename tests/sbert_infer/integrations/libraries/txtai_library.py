"""txtai: an index that is saved and loaded, and a plain function as `transform`."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from txtai import Embeddings

from sbert_infer.integrations.txtai import METHOD
from tests.sbert_infer.integrations.libraries.given import (
    FEW,
    FOLDER,
    MINILM,
    PROMPTED,
    QUERY,
    TEXTS,
    minilm,
    prompted,
    same,
)

embeddings = Embeddings(path=PROMPTED, method=METHOD, vectors={"truncate_dim": 8}, normalize=False)
same(embeddings.model.encode(FEW), prompted.encode(FEW, truncate_dim=8))
same(embeddings.model.encode(FEW, "data"), prompted.encode_document(FEW, truncate_dim=8))
same(embeddings.model.encode([QUERY], "query"), prompted.encode_query([QUERY], truncate_dim=8))

embeddings = Embeddings(path=MINILM, method=METHOD, content=True)
embeddings.index(TEXTS)
embeddings.save(str(FOLDER / "index"))
loaded = Embeddings()
loaded.load(str(FOLDER / "index"))
for index in (embeddings, loaded):
    found = index.search("how do I cook noodles?", 3)
    assert all("pasta" in row["text"] for row in found), found

# Without a class: no prompts, and an index that is loaded needs the function again.
plain = Embeddings(transform=lambda texts: minilm.encode(texts))
plain.index(TEXTS)
assert [index for index, _ in plain.search("how do I cook noodles?", 3)] == [int(row["id"]) for row in found]
