"""LanceDB: a table whose vectors and queries come from SbertEmbeddings."""

# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

import lancedb
import numpy as np
from lancedb.embeddings import get_registry
from lancedb.pydantic import LanceModel, Vector

from sbert_infer.integrations.lancedb import SbertEmbeddings
from tests.sbert_infer.integrations.libraries.given import FEW, FOLDER, MINILM, PROMPTED, QUERY, TEXTS, prompted, same

assert get_registry().get("sbert-infer") is SbertEmbeddings
function = SbertEmbeddings.create(name=PROMPTED, options={"truncate_dim": 8})
same(function.compute_source_embeddings(FEW), prompted.encode_document(FEW, truncate_dim=8))
same(function.compute_query_embeddings(QUERY), prompted.encode_query([QUERY], truncate_dim=8))
minilm = SbertEmbeddings.create(name=MINILM)


class Prompted(LanceModel):
    text: str = function.SourceField()
    vector: Vector(function.ndims()) = function.VectorField()  # type: ignore[valid-type]


class Text(LanceModel):
    text: str = minilm.SourceField()
    vector: Vector(minilm.ndims()) = minilm.VectorField()  # type: ignore[valid-type]


table = lancedb.connect(FOLDER).create_table("prompted", schema=Prompted)
table.add([{"text": text} for text in FEW])
same(np.stack(table.to_pandas()["vector"]), prompted.encode_document(FEW, truncate_dim=8))
again = lancedb.connect(FOLDER).open_table("prompted")
found = again.search(QUERY).distance_type("dot").limit(3).to_list()
scores = prompted.encode_document(FEW, truncate_dim=8) @ prompted.encode_query(QUERY, truncate_dim=8)
assert [row["text"] for row in found] == [FEW[index] for index in (-scores).argsort()[:3]]

texts = lancedb.connect(FOLDER).create_table("texts", schema=Text)
texts.add([{"text": text} for text in TEXTS])
found = texts.search("how do I cook noodles?").limit(3).to_list()
assert all("pasta" in row["text"] for row in found), found
