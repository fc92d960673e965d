"""`Embedder`: what batches say about their vectors."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sbert_infer.embed import Embedder
from sbert_infer.embed.write.origin import read_origin


def test_an_arrow_table_says_from_what_its_vectors_are(small_onnx: Path, tmp_path: Path) -> None:
    embedder = Embedder(str(small_onnx), prompt_name="query", truncate_dim=8)
    batch = pa.table({"text": ["one", "two"]}).replace_schema_metadata({"kept": "yes"})
    pq.write_table(embedder(batch), tmp_path / "vectors.parquet")
    origin = read_origin(tmp_path / "vectors.parquet")
    assert origin is not None
    assert origin.fingerprint == embedder.engine.fingerprint
    assert (origin.prompt, origin.dim, origin.normalize, origin.precision) == ("find this: ", 8, False, "float32")
    assert (origin.text_column, origin.embedding_column) == ("text", "embedding")
    assert pq.read_schema(tmp_path / "vectors.parquet").metadata[b"kept"] == b"yes"
