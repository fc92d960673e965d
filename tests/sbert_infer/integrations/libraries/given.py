"""What each script of this folder is given, and how it compares vectors.

The scripts run in the environment of tests/libraries.txt. Each is one library, unmodified, with a
real engine; what is wrong ends it with an AssertionError.
"""

from __future__ import annotations

import json
import pickle
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sbert_infer import Engine

_given: dict[str, str] = json.load(sys.stdin)
MINILM = _given["minilm"]
PROMPTED = _given["prompted"]  # a small random model whose queries and documents have prompts
FOLDER = Path(_given["folder"])

_SUBJECTS = {
    "cooking": ["pasta sauce", "fried onions", "apple pie", "tomato soup", "grilled fish", "bread dough"],
    "space": ["the moon landing", "a distant galaxy", "the orbit of Mars", "a rocket launch", "black holes", "comets"],
    "music": ["a violin concerto", "jazz piano", "the drum solo", "an opera singer", "guitar chords", "the choir"],
    "money": ["interest rates", "the stock market", "a bank loan", "tax returns", "inflation", "pension funds"],
}
_PHRASES = ["all about {}", "we talked about {} today", "an article on {}", "{} for beginners", "why I love {}"]
_PHRASES += ["a question about {}", "the history of {}", "news about {}"]
TEXTS = [phrase.format(each) for each_of in _SUBJECTS.values() for each, phrase in product(each_of, _PHRASES)]
LABELS = [label for label, each_of in _SUBJECTS.items() for _ in product(each_of, _PHRASES)]
QUERY = "which planet has two moons?"

minilm = Engine(MINILM)
prompted = Engine(PROMPTED)
FEW = TEXTS[::24]


def same(found: Any, expected: Any) -> None:
    """Check that these are the same vectors, but for rounding: a lone text runs on all cores."""
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=1e-5, atol=1e-5)


def pickled(thing: Any) -> Any:
    """Return what another process would have of it."""
    return pickle.loads(pickle.dumps(thing))  # noqa: S301


# Otherwise the order of vectors, and the prompts, would not be checked.
assert len({vector.tobytes() for vector in prompted.encode(FEW)}) == len(FEW)
for _one, _other in [("encode", "encode_query"), ("encode_query", "encode_document"), ("encode", "encode_document")]:
    assert not np.allclose(getattr(prompted, _one)(QUERY), getattr(prompted, _other)(QUERY))
