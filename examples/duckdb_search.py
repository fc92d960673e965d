"""Search a Parquet file with DuckDB: python examples/duckdb_search.py model.onnx vectors.parquet.

`sbert-embed corpus.txt model.onnx --columns text -o vectors.parquet` writes such a file.
"""

from __future__ import annotations

import argparse

import duckdb
from texts import QUESTIONS, show

from sbert_infer import Engine

NEAREST = """
select list_cosine_similarity(embedding, ?::float[]) as score, text
from read_parquet(?)
order by score desc
limit 3
"""


def main(artifact: str, vectors: str) -> None:
    """Search the file directly, with nothing to load first."""
    engine = Engine(artifact)
    database = duckdb.connect()
    for question, vector in zip(QUESTIONS, engine.encode_query(QUESTIONS), strict=True):
        show(question, database.execute(NEAREST, [vector.tolist(), vectors]).fetchall())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("vectors")
    main(**vars(parser.parse_args()))
