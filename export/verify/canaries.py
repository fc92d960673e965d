"""The choice of canaries among the probes: short and long texts of several scripts, a few kB."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.canaries import Canaries
from sbert_infer.export.verify.probe_texts import is_odd
from sbert_infer.types import Text

Array = npt.NDArray[np.float32]

MOST_TEXTS = 32
MOST_BYTES = 96_000  # as JSON: 32 vectors of 1,024 dimensions, fewer of longer ones
# An artifact is checked when it is first opened on a machine, which should not take long.
_SHORT = 32  # tokens of most canaries, at most
_LONG = (64, 128)  # tokens of the others, about


def choose_canaries(
    texts: Sequence[Text],
    lengths: Sequence[int],
    results: Sequence[Array] | Array,
    tasks: Sequence[str | None] | None = None,
) -> dict[str, Any] | None:
    """Return `Manifest.canaries` for some of these texts; None if not even one fits.

    Args:
        texts: the probes. Odd ones are left out, since they have other bounds.
        lengths: the tokens of each.
        results: what the reference gives for each, [rows, dim].
        tasks: of a multi-vector encoder, the role of each.

    """
    natural = [row for row, text in enumerate(texts) if not _any_odd(text) and lengths[row] <= max(_LONG)]
    for count in range(MOST_TEXTS, 0, -1):
        rows = _choose([(row, _is_ascii(texts[row]), lengths[row]) for row in natural], count)
        its_tasks = [tasks[row] for row in rows] if tasks is not None else ()
        chosen = Canaries([texts[row] for row in rows], [results[row] for row in rows], its_tasks)
        if rows and len(json.dumps(entries := chosen.to_json(), ensure_ascii=False).encode()) <= MOST_BYTES:
            return entries
    return None


def _choose(natural: Sequence[tuple[int, bool, int]], count: int) -> list[int]:
    """Return up to `count` rows of (row, whether in ASCII, tokens): some long, the rest short."""
    nearest = [min(natural, key=lambda each: abs(each[2] - long))[0] for long in _LONG if natural]
    long = list(dict.fromkeys(nearest))[: count // 4]
    short = [each for each in natural if each[2] <= _SHORT and each[0] not in long]
    other = _spaced([row for row, ascii_only, _ in short if not ascii_only], (count - len(long)) // 2)
    plain = _spaced([row for row, ascii_only, _ in short if ascii_only], count - len(long) - len(other))
    return [*long, *other, *plain]


def _spaced(rows: Sequence[int], count: int) -> list[int]:
    """Return `count` of `rows`, evenly spaced, or all if there are no more."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return [rows[int(place)] for place in places]


def _parts(text: Text) -> Sequence[str]:
    return (text,) if isinstance(text, str) else text


def _any_odd(text: Text) -> bool:
    return any(map(is_odd, _parts(text)))


def _is_ascii(text: Text) -> bool:
    return all(part.isascii() for part in _parts(text))
