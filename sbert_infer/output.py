"""What `encode` is asked for, checked, and what it gives back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .artifact import SENTENCE, TOKENS
from .precision import PRECISIONS
from .similarity import unit_rows

__all__ = [
    "check_filled",
    "check_options",
    "check_out",
    "check_token_options",
    "finish",
    "given",
    "place",
    "progress_bar",
    "to_torch",
]

logger = logging.getLogger(__package__)

Vectors = npt.NDArray[np.float32]


def check_options(
    output_value: str,
    task: str | None,
    precision: str,
    device: Any,
    own_device: str,
    pool: object,
    chunk_size: object,
    batch_size: Any,
) -> None:
    """Refuse what an engine can't do, by name."""
    if output_value not in (SENTENCE, TOKENS):
        raise ValueError(f"output_value must be {SENTENCE!r} or {TOKENS!r}, got {output_value!r}")
    if task not in (None, "query", "document"):
        raise ValueError(f"task must be 'query', 'document' or None, got {task!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if device is not None and str(device) not in (own_device, own_device.split(":")[0]):
        raise ValueError(f"this engine runs on {own_device!r}, got device={device!r}: see Engine(device=...)")
    if pool is not None or chunk_size is not None:
        raise ValueError("pool and chunk_size are not supported: one engine already uses all cores")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def check_token_options(precision: str, normalize: bool, truncate_dim: int | None, out: Any) -> None:
    """Refuse what is done to sentence vectors only."""
    asked = {
        "precision": precision != "float32",
        "normalize_embeddings": normalize,
        "truncate_dim": truncate_dim is not None,
        "out": out is not None,
    }
    if names := [name for name, is_asked in asked.items() if is_asked]:
        raise ValueError(f"{', '.join(names)}: not with output_value={TOKENS!r}")


def given(inputs: Any, sentences: Any) -> Any:
    """`inputs`, or `sentences`, its old name."""
    if (inputs is None) == (sentences is None):
        raise TypeError("encode needs texts: a str or an iterable of str" if inputs is None else "inputs given twice")
    return inputs if inputs is not None else sentences


def check_out(out: Vectors, dim: int, plain: bool) -> Vectors:
    """`out`, if vectors of `dim` numbers can be written to it as they are."""
    if not plain:
        raise ValueError("out takes float32 vectors: leave precision, convert_to_numpy and convert_to_tensor alone")
    if out.ndim != 2 or out.shape[1] != dim or out.dtype != np.float32:
        raise ValueError(f"out must be float32 of shape [texts, {dim}], got {out.dtype} of {list(out.shape)}")
    return out


def place(vectors: Vectors, start: int, rows: Vectors) -> None:
    """Put `rows` into `vectors` from `start` on."""
    if start + len(rows) > len(vectors):
        raise ValueError(f"out has {len(vectors)} rows, but there are more texts")
    vectors[start : start + len(rows)] = rows


def check_filled(out: Vectors, texts: int) -> Vectors:
    """`out`, if there was a text for each of its rows."""
    if texts < len(out):
        raise ValueError(f"out has {len(out)} rows, but there were only {texts} texts")
    return out


def finish(vectors: Vectors, dim: int, normalize: bool) -> Vectors:
    """The first `dim` numbers of each vector, scaled to length 1 if asked for."""
    vectors = vectors[:, :dim]
    return unit_rows(vectors) if normalize else vectors


def to_torch(vectors: npt.NDArray[Any], as_list: bool) -> Any:
    """A tensor, or a list of one for each text."""
    import torch

    tensor = torch.from_numpy(vectors)
    return list(tensor) if as_list else tensor


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Callable[[int], object]]:
    """A bar that is told how many texts are done. None shows one when this package's logger is at INFO or DEBUG."""
    if show is None:
        show = logger.getEffectiveLevel() in (logging.INFO, logging.DEBUG)
    if not show:
        yield lambda count: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="text", file=sys.stderr) as bar:
        yield bar.update
