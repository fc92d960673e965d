"""What counts as texts, and the errors for what does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np

__all__ = ["OnTruncate", "as_texts", "check_text", "check_texts"]

OnTruncate = Literal["warn", "error", "ignore"]  # what to do about a text that is longer than the model's limit


def as_texts(inputs: Any) -> tuple[Iterable[str], bool]:
    """The texts in order, and whether it was one text alone. What each of them is remains to be checked."""
    if isinstance(inputs, str):
        return [inputs], True
    if isinstance(inputs, (bytes, bytearray, Mapping, Set)) or not isinstance(inputs, Iterable):
        raise TypeError(f"encode needs a str or an iterable of str in order, got {type(inputs).__name__}")
    if (ndim := getattr(inputs, "ndim", 1)) != 1:  # an array, or a table, which would give its column names
        raise TypeError(f"encode needs texts in one dimension, got {type(inputs).__name__} with {ndim}")
    return inputs.tolist() if isinstance(inputs, np.ndarray) else inputs, False


def check_texts(texts: Sequence[object], start: int = 0) -> None:
    """Raise for the first item that `check_text` refuses, naming its index."""
    for index, text in enumerate(texts, start):
        if not isinstance(text, str) or not text.isascii():
            check_text(text, f"text {index}")


def check_text(text: object, name: str) -> None:
    """Raise unless `text` is a str that can be written as UTF-8."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, got {type(text).__name__}: {text!r:.60}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds a lone surrogate, which no encoding can write: {text!r:.60}") from None
