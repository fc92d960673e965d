"""Group texts by topic: python examples/clustering.py model.onnx [texts.txt].

Without a file of texts, one per line, it groups the documentation in the Python installation.
"""

from __future__ import annotations

import argparse
import sys

from documentation import read_texts
from sentence_transformers import util

from sbert_infer import Engine

SHOWN = 10
MIN_COSINE = 0.65  # with the centre of a group; a higher value gives smaller, tighter groups
MIN_SIZE = 5


def main(artifact: str, file: str | None = None) -> None:
    """Group texts that mean nearly the same, without a given number of groups."""
    texts = read_texts(file, 10_000)
    with Engine(artifact, on_truncate="ignore") as engine:
        vectors = engine.encode(texts, show_progress_bar=sys.stderr.isatty())
    groups = util.community_detection(vectors, threshold=MIN_COSINE, min_community_size=MIN_SIZE)
    print(f"{len(groups)} groups hold {sum(map(len, groups)):,} of {len(texts):,} texts; the largest:")
    for group in groups[:SHOWN]:
        print(f"\n{len(group)} texts like")
        for index in group[:3]:
            print(f"  {texts[index]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("file", nargs="?")
    main(**vars(parser.parse_args()))
