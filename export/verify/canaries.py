"""The choice of canaries among the probes: short and long texts of several scripts, a few kB."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
_MEDIUM = 64  # of those in other scripts, which many models take letter by letter
_LONG = (64, 128)  # of a few others, about


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
    natural = [row for row, text in enumerate(texts) if not _any(text, is_odd) and lengths[row] <= max(_LONG)]
    for count in range(MOST_TEXTS, 0, -1):
        rows = _choose([(row, _any(texts[row], _is_other_script), lengths[row]) for row in natural], count)
        its_tasks = [tasks[row] for row in rows] if tasks is not None else ()
        chosen = Canaries([texts[row] for row in rows], [results[row] for row in rows], its_tasks)
        if rows and len(json.dumps(entries := chosen.to_json(), ensure_ascii=False).encode()) <= MOST_BYTES:
            return entries
    return None


def _choose(natural: Sequence[tuple[int, bool, int]], count: int) -> list[int]:
    """Return up to `count` rows of (row, whether in another script, tokens).

    Some are long, a third is in other scripts than the Latin one, and the rest is short.
    """
    nearest = [min(natural, key=lambda each: abs(each[2] - long))[0] for long in _LONG if natural]
    long = list(dict.fromkeys(nearest))[: count // 4]
    left = [each for each in natural if each[0] not in long]
    other = _spaced([row for row, is_other, tokens in left if is_other and tokens <= _MEDIUM], count // 3)
    short = [row for row, is_other, tokens in left if not is_other and tokens <= _SHORT]
    return [*long, *other, *_spaced(short, count - len(long) - len(other))]


def _spaced(rows: Sequence[int], count: int) -> list[int]:
    """Return `count` of `rows`, evenly spaced, or all if there are no more."""
    places = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return [rows[int(place)] for place in places]


def _any(text: Text, test: Callable[[str], bool]) -> bool:
    """Whether the text, or one of a pair, passes the test."""
    return any(map(test, (text,) if isinstance(text, str) else text))


def _is_other_script(text: str) -> bool:
    """Whether most characters are not of the Latin script, as far as that can be told cheaply."""
    return sum(map(str.isascii, text)) * 2 < len(text)
