"""Rounding a weight matrix so that its products change the least (GPTQ).

Rounding each weight to the nearest step is best for the weights, not for `x @ W`. Here the rows are
rounded one after the other, and the error of a row in the products is compensated by the rows after
it, as far as their inputs correlate in the calibration texts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.floating[Any]]

_DAMPING = 0.01  # of the mean square, added to each: inputs that the calibration texts lack still count
_BLOCK = 128  # rows; corrections of later blocks are applied all at once


def correction(moments: Matrix) -> npt.NDArray[np.float64]:
    """How to spread the rounding error of each row over the later ones.

    The upper Cholesky factor of the inverse of the second moments `x.T @ x` [in, in].
    """
    damped = moments.astype(np.float64)
    mean = float(np.trace(damped)) / len(damped)
    np.fill_diagonal(damped, damped.diagonal() + max(_DAMPING * mean, 1e-10))
    upper: npt.NDArray[np.float64] = np.linalg.cholesky(np.linalg.inv(damped)).T
    return upper


def round_rows(weight: Matrix, steps: Matrix, largest: int, spread: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """Round `weight` [in, out] to integer multiples of `steps` [out], at most `largest`."""
    rest = weight.astype(np.float64)
    integers = np.empty(weight.shape, np.int8)
    for start in range(0, len(rest), _BLOCK):
        stop = min(start + _BLOCK, len(rest))
        errors = np.empty((stop - start, weight.shape[1]))
        for row in range(start, stop):
            integers[row] = np.clip(np.rint(rest[row] / steps), -largest, largest)
            errors[row - start] = (rest[row] - integers[row] * steps) / spread[row, row]
            rest[row + 1 : stop] -= np.outer(spread[row, row + 1 : stop], errors[row - start])
        rest[stop:] -= spread[start:stop, stop:].T @ errors
    return integers
