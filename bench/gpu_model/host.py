"""What the host's part of the pipeline costs: measured here, or as measured before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer.encode.output import not_finite
from sbert_infer.text.packing import Packer
from sbert_infer.text.tokenizer import Tokenizer

_ROUNDS = 9


@dataclass(frozen=True)
class HostCosts:
    """Seconds on one core.

    The defaults were measured on an AMD EPYC (Zen 5) with MiniLM's tokenizer, and rounded up.
    """

    tokenize_s: float = 1e-6  # per token, in the tokenizer's own threads
    collect_text_s: float = 0.75e-6  # per text, in Python: ids to one array
    collect_s: float = 25e-9  # per token, in Python: the same
    plan_s: float = 5e-6  # per row that runs, in Python: which texts run together
    make_s: float = 5e-9  # per token that runs, in Python: the arrays of a batch, in page-locked memory
    take_s: float = 0.5e-9  # per number of a vector, in Python: to its place in the window
    gather_s: float = 0.1e-9  # per number of a vector, in Python: from the window to the result
    batch_s: float = 100e-6  # per batch, in Python: futures, small arrays, nine CUDA calls. Assumed
    pieces: int = 1  # in which a window's texts are tokenized


def measure_host(tokenizer: Tokenizer, texts: Sequence[str], packer: Packer) -> HostCosts:
    """Measure the costs on this machine.

    The environment must say TOKENIZERS_PARALLELISM=false: only this thread's time is measured.
    """
    tokenized = tokenizer(texts)
    tokens, lengths = tokenized.tokens(), tokenized.lengths
    collect_text_s = _collecting_s(tokenizer, ["a"] * len(texts)) / len(texts)
    collect_s = _collecting_s(tokenizer, texts) - len(texts) * collect_text_s
    batches = packer.pack(lengths)
    found = np.ones((len(texts), packer.hidden), np.float32)
    window, order = np.empty_like(found), np.arange(len(texts))[::-1].copy()
    return HostCosts(
        tokenize_s=_fastest(lambda: tokenizer.backend.encode_batch_fast(texts)) / tokens,
        collect_text_s=collect_text_s,
        collect_s=max(0.0, collect_s) / tokens,
        plan_s=_fastest(lambda: packer.pack(lengths)) / sum(batch.shape.rows for batch in batches),
        make_s=_fastest(lambda: tokenized.packed(batches[0], 0)) / batches[0].tokens,
        take_s=_fastest(lambda: _take(window, order, found)) / found.size,
        gather_s=_fastest(lambda: np.copyto(window, found)) / found.size,
    )


def _collecting_s(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """Return the seconds that `Tokenizer` spends on what the tokenizer's library gives it."""
    given = [tokenizer.backend.encode_batch_fast(texts) for _ in range(_ROUNDS)]
    tokens = sum(map(len, given[0]))
    return _fastest(lambda: _collect(given.pop(), tokens))


def _collect(encodings: list[Any], tokens: int) -> None:
    np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int64, tokens)
    np.fromiter((bool(encoding.overflowing) for encoding in encodings), np.bool_, len(encodings))
    encodings.clear()  # freeing them takes time as well


def _take(window: npt.NDArray[np.float32], order: npt.NDArray[np.int64], found: npt.NDArray[np.float32]) -> None:
    """Do what a slot and a collector do with a batch's vectors."""
    vectors = found[order]
    window[order] = vectors
    not_finite(order, vectors)


def _fastest(function: Callable[[], object]) -> float:
    """Return the least processor time of several runs."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.thread_time()
        function()
        seconds.append(time.thread_time() - start)
    return min(seconds)
