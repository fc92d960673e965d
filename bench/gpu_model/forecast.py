"""Forecasts: a model on a GPU, texts of some lengths, and what keeps the GPU waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.gpu_model.host import HostCosts
from sbert_infer.bench.gpu_model.pipeline import BatchCosts, Trace, WindowCosts, simulate
from sbert_infer.bench.gpu_model.roofline import Gpu, Model
from sbert_infer.bench.workloads import WORKLOADS
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.text.packing import PackedRows, pack_rows
from sbert_infer.text.shapes import choose_shapes

BUSY = 0.9  # what we ask of a GPU
MAX_BATCH_TOKENS = 16384
_WINDOWS = 8
_MOST_CORES = 512
# English in a WordPiece vocabulary of 30,000: measured on the benchmark's texts.
_TOKENS_PER_WORD, _SPECIAL_TOKENS = 1.32, 2
# Resource of the simulation -> what a person would call it.
_NAMES = {"tokenizer": "tokenizing", "python": "Python", "copy in": "PCIe", "copy out": "PCIe", "gpu": "GPU"}

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """A model's batches for some windows of texts, planned as the runtime plans them."""

    model: Model
    lengths: tuple[Lengths, ...]  # of each window
    windows: tuple[tuple[PackedRows, ...], ...]

    @property
    def texts(self) -> int:
        """Texts of all windows."""
        return sum(map(len, self.lengths))

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(int(lengths.sum()) for lengths in self.lengths)


@dataclass(frozen=True)
class Forecast:
    """What a simulation gives."""

    texts_per_s: float
    tokens_per_s: float
    gpu_busy: float
    bottleneck: str


def plan_work(
    model: Model, workload: str, max_batch_tokens: int = MAX_BATCH_TOKENS, windows: int = _WINDOWS
) -> Work:
    """Plan windows of one of the benchmark's workloads, in the shapes of a plan without calibration."""
    rng = random.Random(workload)  # noqa: S311 - it must be repeatable
    shapes = choose_shapes(None, model.max_length, model.hidden, max_batch_tokens)
    lengths = tuple(_lengths(workload, rng, model.max_length) for _ in range(windows))
    return Work(model, lengths, tuple(tuple(pack_rows(each, shapes, model.hidden)) for each in lengths))


def window_costs(work: Work, gpu: Gpu, host: HostCosts, cores: int) -> list[WindowCosts]:
    """Return what each window costs on the host, and each of its batches."""
    numbers = work.model.hidden
    return [
        WindowCosts(
            tokenize_s=int(lengths.sum()) * host.tokenize_s / cores,
            collect_s=int(lengths.sum()) * host.collect_s + sum(b.shape.rows for b in batches) * host.plan_s,
            gather_s=len(lengths) * numbers * host.gather_s,
            batches=tuple(_batch_costs(work.model, batch, gpu, host) for batch in batches),
        )
        for lengths, batches in zip(work.lengths, work.windows, strict=True)
    ]


def forecast(work: Work, gpu: Gpu, host: HostCosts, cores: int, slots: int = 2) -> Forecast:
    """Simulate the pipeline with `cores` for tokenizing."""
    trace = simulate(window_costs(work, gpu, host, cores), slots=slots)
    return Forecast(work.texts / trace.seconds, work.tokens / trace.seconds, trace.busy("gpu"), bottleneck(trace))


def cores_needed(work: Work, gpu: Gpu, host: HostCosts, slots: int = 2) -> int | None:
    """Return how many cores of tokenizing keep the GPU busy; None if no number does."""
    if forecast(work, gpu, host, _MOST_CORES, slots).gpu_busy < BUSY:
        return None
    few, enough = 0, _MOST_CORES
    while enough - few > 1:
        half = (few + enough) // 2
        few, enough = (few, half) if forecast(work, gpu, host, half, slots).gpu_busy >= BUSY else (half, enough)
    return enough


def bottleneck(trace: Trace) -> str:
    """Return what is used most: the GPU, if it is busy."""
    if trace.busy("gpu") >= BUSY:
        return _NAMES["gpu"]
    return _NAMES[max(trace.resources, key=lambda name: trace.resources[name].busy_s)]


def _batch_costs(model: Model, batch: PackedRows, gpu: Gpu, host: HostCosts) -> BatchCosts:
    return BatchCosts(
        make_s=host.batch_s + host.make_s * batch.shape.tokens,
        copy_in_s=model.copy_in_s(batch.shape, gpu),
        run_s=model.run_s(batch.shape, gpu),
        copy_out_s=model.copy_out_s(batch.shape, gpu),
        take_s=host.take_s * len(batch.texts) * model.hidden,
        calls=host.calls,
        call_s=host.call_s,
    )


def _lengths(workload: str, rng: random.Random, longest: int) -> Lengths:
    words: Sequence[int] = [WORKLOADS[workload](rng) for _ in range(WINDOW_TEXTS)]
    tokens = np.round(_SPECIAL_TOKENS + _TOKENS_PER_WORD * np.array(words)).astype(np.int64)
    return np.minimum(tokens, longest)
