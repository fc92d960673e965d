"""Conversion of results to arrays or tensors, and the progress bar."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.errors import EngineError

logger = logging.getLogger("sbert_infer")


def import_torch() -> Any:
    """Import torch, or raise an error that says how to do without it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        fix = "pip install torch, or pass convert_to_numpy=True"
        raise EngineError(f"tensors need torch, which is not installed: {fix}") from error


def to_torch(vectors: npt.NDArray[Any], as_list: bool) -> Any:
    """Return one tensor, or a list with a tensor for each text."""
    tensor = import_torch().from_numpy(vectors)
    return list(tensor) if as_list else tensor


def convert_each(each: list[npt.NDArray[np.float32]], single: bool, *, arrays: bool) -> Any:
    """Return a list with an array or tensor for each text, or only one for a single text."""
    found = each if arrays else [to_torch(one, as_list=False) for one in each]
    return found[0] if single else found


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a progress bar, and yield the function that advances it by a number of texts.

    If `show` is None, show it when this package's logger is at INFO or DEBUG.
    """
    if show is None:
        show = logger.getEffectiveLevel() in (logging.INFO, logging.DEBUG)
    if not show:
        yield lambda count: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="text", file=sys.stderr) as bar:
        yield bar.update
