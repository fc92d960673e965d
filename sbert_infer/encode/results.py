"""What `encode` is asked for, checked, and what it gives back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.artifact.manifest import SENTENCE, TOKENS
from sbert_infer.encode.precision import PRECISIONS
from sbert_infer.similarity import unit_rows

__all__ = [
    "Asked",
    "check_asked",
    "check_filled",
    "check_out",
    "check_running",
    "convert_each",
    "finish",
    "given",
    "place",
    "progress_bar",
    "to_torch",
]

logger = logging.getLogger("sbert_infer")

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Asked:
    """What `encode` is asked for, under the names and with the defaults of its own arguments."""

    prompt: str = ""  # itself, not its name
    batch_size: int | None = None
    show_progress_bar: bool | None = None
    output_value: str = SENTENCE
    precision: str = "float32"
    convert_to_numpy: bool = True
    convert_to_tensor: bool = False
    normalize_embeddings: bool = False
    truncate_dim: int | None = None
    out: Vectors | None = None
    max_active_dims: int | None = None
    task: str | None = None

    @property
    def as_arrays(self) -> bool:
        """Not as tensors."""
        return self.convert_to_numpy and not self.convert_to_tensor

    def or_truncated_to(self, dim: int | None) -> Asked:
        """With the engine's own `truncate_dim`, unless there is one."""
        return self if self.truncate_dim is not None else replace(self, truncate_dim=dim)

    def refuse(self, names: str, why: str) -> None:
        """Raise, by name, if any of these arguments was given, and `why` it can't be."""
        defaults = {field.name: field.default for field in fields(self)}
        given = [name for name in names.split() if not _is(getattr(self, name), defaults[name])]
        if given:
            raise ValueError(f"{', '.join(given)}: {why}")


def _is(value: object, default: object) -> bool:
    if isinstance(default, bool):
        return bool(value) == default
    return value == default if isinstance(default, str) else value is default  # an array is equal to nothing


def check_asked(asked: Asked) -> None:
    """Refuse what no engine can do."""
    if asked.output_value not in (SENTENCE, TOKENS):
        raise ValueError(f"output_value must be {SENTENCE!r} or {TOKENS!r}, got {asked.output_value!r}")
    if asked.task not in (None, "query", "document"):
        raise ValueError(f"task must be 'query', 'document' or None, got {asked.task!r}")
    if asked.precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {asked.precision!r}")


def check_running(batch_size: Any, device: Any, own_device: str, pool: object, chunk_size: object) -> None:
    """Refuse to run in a way that an engine does not."""
    if device is not None and str(device) not in (own_device, own_device.split(":")[0]):
        raise ValueError(f"this engine runs on {own_device!r}, got device={device!r}: see Engine(device=...)")
    if pool is not None or chunk_size is not None:
        raise ValueError("pool and chunk_size are not supported: one engine already uses all cores")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def given(inputs: Any, sentences: Any) -> Any:
    """`inputs`, or `sentences`, its old name."""
    if (inputs is None) == (sentences is None):
        raise TypeError("encode needs texts: a str or an iterable of str" if inputs is None else "inputs given twice")
    return inputs if inputs is not None else sentences


def check_out(out: Vectors, dim: int, asked: Asked) -> Vectors:
    """`out`, if vectors of `dim` numbers can be written to it as they are."""
    if asked.precision != "float32" or not asked.as_arrays:
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


def convert_each(each: list[Vectors], single: bool, asked: Asked) -> Any:
    """Of each text an array, or a tensor."""
    found = each if asked.as_arrays else [to_torch(one, as_list=False) for one in each]
    return found[0] if single else found


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
