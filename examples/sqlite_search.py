"""Search inside SQLite, with sqlite-vec: python examples/sqlite_search.py model.onnx.

Python's own sqlite3 module is often built without loadable extensions; apsw always has them.
"""

from __future__ import annotations

import argparse

import apsw
import sqlite_vec
from texts import QUESTIONS, TEXTS, show

from sbert_infer import Engine


def main(artifact: str) -> None:
    """Fill a table, then search."""
    engine = Engine(artifact)
    vectors = engine.encode_document(TEXTS)

    database = apsw.Connection(":memory:")  # or a file
    database.enable_load_extension(True)
    database.load_extension(sqlite_vec.loadable_path())
    database.execute(
        f"create virtual table texts using vec0(embedding float[{vectors.shape[1]}] distance_metric=cosine, +text text)"
    )
    rows = [(vector.tobytes(), text) for vector, text in zip(vectors, TEXTS, strict=True)]
    database.executemany("insert into texts(embedding, text) values (?, ?)", rows)

    nearest = "select 1 - distance, text from texts where embedding match ? and k = 3 order by distance"
    for question, vector in zip(QUESTIONS, engine.encode_query(QUESTIONS), strict=True):
        show(question, list(database.execute(nearest, (vector.tobytes(),))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    main(**vars(parser.parse_args()))
