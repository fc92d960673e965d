"""Rounding a weight matrix to integer steps so that its products change the least (GPTQ).

Rounding each weight to the nearest step is best for the weights, not for `x @ W`. Here the rows are
rounded one after the other, the last one first, and what rounding a row changes in the products is
made up for by the rows still to come, as far as their inputs correlate in the calibration texts.

With `x.T @ x = L @ L.T` the change of the products is `|L.T @ (W - rounded)|`, and row `i` of that
has only rows from `i` on: each row can be chosen so that its own term is least, given those after
it. So the factor `L` is all that is needed, and no inverse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Matrix = npt.NDArray[np.floating[Any]]

_DAMPING = 0.01  # of the mean square, added to each: inputs that the calibration texts lack still count
_BLOCK = 64  # rows; what they change in earlier blocks is applied all at once


def correction(moments: Matrix) -> npt.NDArray[np.float32]:
    """How much of each row's rounding error every earlier row has to make up for [in, in].

    `moments` are `x.T @ x`. The result is their lower Cholesky factor, columns divided by their
    diagonal.
    """
    damped = moments.astype(np.float64)
    mean = float(np.trace(damped)) / len(damped)
    np.fill_diagonal(damped, damped.diagonal() + max(_DAMPING * mean, 1e-10))
    lower = torch.linalg.cholesky(torch.from_numpy(damped))  # four times as fast as numpy's
    spread: npt.NDArray[np.float32] = (lower / lower.diagonal()).float().numpy()
    return spread


def round_rows(weight: Matrix, steps: Matrix, largest: int, spread: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    """Round `weight` [in, out] to integer multiples of `steps` [out], at most `largest`."""
    exact = torch.from_numpy((weight / steps).astype(np.float32))  # in steps, of which whole ones are wanted
    wanted, factor = exact.clone(), torch.from_numpy(spread)
    integers = torch.empty(exact.shape, dtype=torch.int8)
    for stop in range(len(exact), 0, -_BLOCK):
        start = max(stop - _BLOCK, 0)
        block, errors = wanted[start:stop], torch.empty(stop - start, exact.shape[1])
        for row in range(stop - start - 1, -1, -1):
            later = factor[start + row + 1 : stop, start + row] @ errors[row + 1 :]
            rounded = (block[row] + later).round_().clamp_(-largest, largest)
            torch.sub(exact[start + row], rounded, out=errors[row])
            integers[start + row] = rounded
        wanted[:start].addmm_(factor[start:stop, :start].T, errors)
    result: npt.NDArray[np.int8] = integers.numpy()
    return result
