"""Find paraphrases: python examples/paraphrase_mining.py model.onnx [texts.txt].

Without a file of texts, one per line, it searches the documentation in the Python installation.
"""

from __future__ import annotations

import argparse
import re
import sys

from documentation import read_texts
from sentence_transformers import util

from sbert_infer import Engine

SHOWN = 10
COMMON_WORDS = 1 / 3  # pairs that share more of their words could be found without a model


def main(artifact: str, file: str | None = None) -> None:
    """Compare every text with every other; show the most similar pairs with different wording."""
    texts = read_texts(file, 10_000)
    with Engine(artifact, on_truncate="ignore") as engine:
        pairs = util.paraphrase_mining(engine, texts, show_progress_bar=sys.stderr.isatty(), top_k=5)
    others = [pair for pair in pairs if common_words(texts[pair[1]], texts[pair[2]]) <= COMMON_WORDS]
    print(f"{len(texts) * (len(texts) - 1) // 2:,} pairs compared; the most similar of different wording:")
    for score, left, right in others[:SHOWN]:
        print(f"\n{score:.2f}  {texts[left]}\n      {texts[right]}")


def common_words(one: str, other: str) -> float:
    """Share of the words in either text that are in both."""
    words, more = (set(re.findall(r"\w+", text.lower())) for text in (one, other))
    return len(words & more) / max(1, len(words | more))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("file", nargs="?")
    main(**vars(parser.parse_args()))
