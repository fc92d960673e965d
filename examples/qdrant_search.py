"""Search with Qdrant, without a server: python examples/qdrant_search.py model.onnx."""

from __future__ import annotations

import argparse

from qdrant_client import QdrantClient, models
from texts import QUESTIONS, TEXTS, show

from sbert_infer import Engine


def main(artifact: str) -> None:
    """Fill a collection, then search."""
    engine = Engine(artifact)
    vectors = engine.encode_document(TEXTS)

    client = QdrantClient(":memory:")  # or path="folder", or url="http://localhost:6333"
    client.create_collection(
        "texts", vectors_config=models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    )
    points = [
        models.PointStruct(id=row, vector=vector.tolist(), payload={"text": text})
        for row, (vector, text) in enumerate(zip(vectors, TEXTS, strict=True))
    ]
    client.upsert("texts", points)

    for question, vector in zip(QUESTIONS, engine.encode_query(QUESTIONS), strict=True):
        hits = client.query_points("texts", query=vector.tolist(), limit=3).points
        show(question, [(hit.score, hit.payload["text"]) for hit in hits])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    main(**vars(parser.parse_args()))
