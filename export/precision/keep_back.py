"""Which products of an 8-bit model to keep in FP32, where rounding all of them costs too much.

The error of a few texts is measured in one session that has each product in both precisions and an
input that chooses between them. With one group of products after the other in FP32, each group's
share of the error is known; the largest are kept, one after the other, until what is left is small
enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.precision.inner_session import InnerSession
from sbert_infer.export.precision.int8 import KEPT, Batch, Rounded, quantize_by_choice

# The lowest cosine of natural texts to reach, if a quarter of the groups suffices for it. A
# certificate has some hundred: of thousands, the worst is three to four times as far off.
AIM = 0.996
_MARGIN = 1.1  # other texts may gain a little less
_MAX_TOKENS = 512  # of the texts to measure on: a base-size model runs them fifty times in half a minute


def most_kept(rounded: Rounded, *, for_aim: bool = False) -> int:
    """How many groups may be kept at most: with more than half, 8 bits are hardly faster.

    `for_aim` is what may be spent on more than the bound.
    """
    return len(rounded.groups) // (4 if for_aim else 2)


def keep_back(
    model: ir.Model,
    rounded: Rounded,
    batches: Sequence[Batch],
    kept: Sequence[int],
    excess: float,
    most: int,
    progress: Progress = no_progress,
) -> list[int]:
    """The groups to keep in FP32, those already `kept` first, so that the error falls enough.

    `model` is the FP32 graph, which is changed. `batches` hold one text each, the worst first,
    whose error is `excess` times as large as it may be. No more than `most` groups are kept, even
    if they do not suffice. `progress` takes the number of groups done.
    """
    error = _Errors(quantize_by_choice(model, rounded), len(rounded.groups), _some(batches))
    before = error.with_kept(kept)
    left = {}
    for index in range(len(rounded.groups)):
        if index not in kept:
            left[index] = error.with_kept([*kept, index])
        progress(1)
    chosen = list(kept)
    for index in sorted(left, key=left.__getitem__):
        chosen.append(index)
        if len(chosen) >= most or error.with_kept(chosen) * excess * _MARGIN <= before:
            break
    return chosen


def _some(batches: Sequence[Batch]) -> list[Batch]:
    """The first of them, and those after it that are not too many tokens together."""
    some = [batches[0]]
    for batch in batches[1:]:
        if sum(each["attention_mask"].size for each in [*some, batch]) <= _MAX_TOKENS:
            some.append(batch)
    return some


class _Errors:
    """The squared error of the graph's first output, over all batches."""

    def __init__(self, model: ir.Model, groups: int, batches: Sequence[Batch]) -> None:
        self._session, self._batches, self._groups = InnerSession(model), batches, groups
        self._output = str(model.graph.outputs[0].name)
        self._exact = self._run(range(groups))

    def with_kept(self, kept: Sequence[int]) -> float:
        """The error if the groups `kept` are computed in FP32, the others in 8 bits."""
        pairs = zip(self._run(kept), self._exact, strict=True)
        return sum(float(np.square(found - exact).sum()) for found, exact in pairs)

    def _run(self, kept: Sequence[int]) -> list[npt.NDArray[np.float32]]:
        choice = np.isin(np.arange(self._groups), kept)
        return [self._session.run([self._output], {**batch, KEPT: choice})[0] for batch in self._batches]
