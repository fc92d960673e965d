"""Search with FAISS: python examples/faiss_search.py model.onnx."""

from __future__ import annotations

import argparse

import faiss
from texts import QUESTIONS, TEXTS, show

from sbert_infer import Engine


def main(artifact: str) -> None:
    """Index the texts in memory, then search."""
    engine = Engine(artifact)
    vectors = engine.encode_document(TEXTS, normalize_embeddings=True)  # [texts, dim], float32 as FAISS needs it

    index = faiss.IndexFlatIP(vectors.shape[1])  # exact; for unit vectors the inner product is the cosine
    index.add(vectors)

    scores, rows = index.search(engine.encode_query(QUESTIONS, normalize_embeddings=True), 3)
    for question, best, found in zip(QUESTIONS, scores.tolist(), rows.tolist(), strict=True):
        show(question, [(score, TEXTS[row]) for score, row in zip(best, found, strict=True)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    main(**vars(parser.parse_args()))
