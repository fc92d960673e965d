"""How results are handed over: as arrays or tensors, with a progress bar on the way."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.encode.options import EncodeOptions

__all__ = ["convert_each", "progress_bar", "to_torch"]

logger = logging.getLogger("sbert_infer")


def to_torch(vectors: npt.NDArray[Any], as_list: bool) -> Any:
    """Return a tensor, or a list of one for each text."""
    import torch

    tensor = torch.from_numpy(vectors)
    return list(tensor) if as_list else tensor


def convert_each(each: list[npt.NDArray[np.float32]], single: bool, options: EncodeOptions) -> Any:
    """Return an array, or a tensor, for each text."""
    found = each if options.as_arrays else [to_torch(one, as_list=False) for one in each]
    return found[0] if single else found


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a bar; the context is a function to call with the number of texts that were done since.

    None shows one when this package's logger is at INFO or DEBUG.
    """
    if show is None:
        show = logger.getEffectiveLevel() in (logging.INFO, logging.DEBUG)
    if not show:
        yield lambda count: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="text", file=sys.stderr) as bar:
        yield bar.update
