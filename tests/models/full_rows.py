"""Texts that fill the rows of a plan's shapes, and running them in just one of its shapes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sbert_infer import Engine
from sbert_infer.artifact.manifest import SENTENCE
from sbert_infer.artifact.plan_file import Plan
from sbert_infer.encode.pipeline import packed_batch
from sbert_infer.text.packing import pack_rows
from sbert_infer.types import Shape

# Each is one token, of BERT's vocabulary and of the small checkpoints'.
WORDS = "rain roof kitchen dogs red ball water sugar radio spoon train winter bread fence week people".split()  # noqa: SIM905
_SHORT = 8  # tokens


def texts_of(length: int, count: int) -> list[str]:
    """Return different texts of `length` tokens each, the two special ones included.

    The words of a text are the digits of its number, in base 16, over and over.
    """
    words, base = length - 2, len(WORDS)
    digits = min(words, 4)
    if count > base**digits:
        raise ValueError(f"there are no {count} different texts of {length} tokens")
    places = [base ** (at % digits) for at in range(words)]
    return [" ".join(WORDS[number // place % base] for place in places) for number in range(count)]


def fillings(shape: Shape, longest: int) -> Iterator[list[str]]:
    """Yield texts of up to `longest` tokens that fill the rows of `shape`, one or more in each."""
    rows, length = shape.rows, shape.length
    yield texts_of(min(length, longest), rows)
    if shape.segments >= 2 and length - length // 3 <= longest:
        yield texts_of(length - length // 3, rows) + texts_of(length // 3, rows)
    many = min(shape.segments, length // _SHORT)
    if many > 2:
        yield texts_of(_SHORT, rows * many)


def run_in_shape(engine: Engine, shape: Shape, texts: list[str]) -> npt.NDArray[np.float32]:
    """Return the vectors of texts that fill all rows of one batch of this shape."""
    pipeline, plan = engine.pipeline, engine.artifact
    assert isinstance(plan, Plan)
    tokenized = pipeline.tokenizer(texts)
    (packed,) = pack_rows(tokenized.lengths, [shape], plan.rows.hidden)
    assert set(packed.rows.tolist()) == set(range(shape.rows))
    batch = packed_batch(tokenized, packed, plan.manifest.pad_id)
    (vectors,) = pipeline.backend.run(batch, (SENTENCE,))
    found: npt.NDArray[np.float32] = vectors[np.argsort(packed.texts), : engine.get_embedding_dimension()]
    return found
