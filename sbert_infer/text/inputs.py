"""Checks of the texts and pairs that callers pass, with errors that name the wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from sbert_infer.types import Text


def as_texts(inputs: Any) -> tuple[Iterable[str], bool]:
    """Return the texts in order, and whether a single text was given. Items are not checked yet.

    `{"text": "..."}`, as in inputs of several kinds, is the text.
    """
    inputs = _plain(inputs)
    if isinstance(inputs, np.ndarray) and inputs.ndim == 0:
        inputs = inputs.item()
    if isinstance(inputs, str):
        return [inputs], True
    if type(inputs) is list:  # before the slower checks below; a table may be a subclass of list
        return list(map(_plain, inputs)) if inputs and isinstance(inputs[0], dict) else inputs, False
    if isinstance(inputs, (bytes, bytearray, Mapping, Set)) or not isinstance(inputs, Iterable):
        raise TypeError(f"encode needs a str or an iterable of str in order, got {type(inputs).__name__}")
    if (ndim := getattr(inputs, "ndim", 1)) != 1:  # an array, or a table, which would yield its column names
        raise TypeError(f"encode needs texts in one dimension, got {type(inputs).__name__} with {ndim}")
    return map(_plain, inputs.tolist() if isinstance(inputs, np.ndarray) else inputs), False


def _plain(item: Any) -> Any:
    return item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item


def as_list(inputs: Any, method: str) -> list[str]:
    """Return the texts as a list, checked. A single str, which iterates characters, is refused."""
    texts, single = as_texts(inputs)
    if single:
        raise TypeError(f"{method} needs a list of texts, got one str")
    known = list(texts)
    check_texts(known)
    return known


def as_pairs(inputs: Any) -> tuple[list[Any], bool]:
    """Return the pairs in order, and whether a single pair was given. Items are not checked yet."""
    if isinstance(inputs, (str, bytes, bytearray, Mapping, Set)) or not isinstance(inputs, Iterable):
        raise TypeError(f"predict needs a pair of texts or a list of pairs, got {type(inputs).__name__}")
    if hasattr(inputs, "columns"):  # a table, which would yield its column names
        raise TypeError(f"predict needs a list of pairs, got {type(inputs).__name__}: pass its values")
    items = inputs.tolist() if isinstance(inputs, np.ndarray) else list(inputs)
    single = bool(items) and isinstance(items[0], str)
    return [items] if single else items, single


def check_pairs(pairs: Sequence[object], start: int = 0) -> None:
    """Raise an error that names the index of the first item that is not a pair of texts."""
    for index, pair in enumerate(pairs, start):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"pair {index} must be two texts, got {type(pair).__name__}: {pair!r:.60}")
        for place, text in zip(("first", "second"), pair, strict=True):
            check_text(text, f"the {place} text of pair {index}")


def characters(text: Text) -> int:
    """Return the number of characters of a text or a pair."""
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def prepend(prompt: str, texts: Sequence[Text]) -> list[Text]:
    """Put `prompt` before each text, or before the first text of each pair."""
    return [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts]


def check_texts(texts: Sequence[object], start: int = 0) -> None:
    """Raise an error that names the index of the first item that `check_text` refuses."""
    for index, text in enumerate(texts, start):
        if not isinstance(text, str) or not text.isascii():
            check_text(text, f"text {index}")


def check_text(text: object, name: str) -> None:
    """Raise unless `text` is a str that can be encoded as UTF-8."""
    if not isinstance(text, str):
        hint = "; pairs are for Reranker" if isinstance(text, (tuple, list)) else ""
        raise TypeError(f"{name} must be a str, got {type(text).__name__}: {text!r:.60}{hint}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds a lone surrogate, which no encoding can write: {text!r:.60}") from None


def check_on_truncate(value: object) -> None:
    """Raise unless `value` is one of `OnTruncate`."""
    if value not in ("warn", "error", "ignore"):
        raise ValueError(f"on_truncate must be 'warn', 'error' or 'ignore', got {value!r}")
