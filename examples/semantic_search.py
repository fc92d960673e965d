"""Search texts by meaning: python examples/semantic_search.py model.onnx [texts.txt [question]].

Without a file of texts, one per line, it searches 36,000 sentences of the documentation in the
Python installation.
"""

from __future__ import annotations

import argparse
import sys
import time

from documentation import read_texts
from sentence_transformers import util
from texts import show

from sbert_infer import Engine

QUESTIONS = [
    "How do I make text safe to put into a web page?",
    "wait until all of my background work has finished",
    "duplicate a whole folder",
    "What kind of file is this, going by its name?",
]


def main(artifact: str, file: str | None = None, question: str | None = None) -> None:
    """Encode all texts once, then answer questions."""
    texts = read_texts(file, 36_000)
    questions = [question] if question else QUESTIONS
    with Engine(artifact, on_truncate="ignore") as engine:
        start = time.perf_counter()
        vectors = engine.encode_document(texts, show_progress_bar=sys.stderr.isatty())
        seconds = time.perf_counter() - start
        print(f"{len(texts):,} texts encoded in {seconds:.1f} s, {len(texts) / seconds:,.0f} a second")

        start = time.perf_counter()
        found = util.semantic_search(engine.encode_query(questions), vectors, top_k=3)
        print(f"{len(questions)} questions answered in {1000 * (time.perf_counter() - start):.0f} ms")
    for asked, hits in zip(questions, found, strict=True):
        show(asked, [(hit["score"], texts[hit["corpus_id"]]) for hit in hits])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("file", nargs="?")
    parser.add_argument("question", nargs="?")
    main(**vars(parser.parse_args()))
