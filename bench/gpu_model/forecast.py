"""Forecasts: a model on a GPU, texts of some lengths, and what keeps the GPU waiting."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sbert_infer.bench.gpu_model.host import HostCosts
from sbert_infer.bench.gpu_model.pipeline import BatchCosts, WindowCosts, simulate
from sbert_infer.bench.gpu_model.roofline import Gpu, Model
from sbert_infer.bench.workloads import WORKLOADS
from sbert_infer.encode.pipeline import WINDOW_TEXTS
from sbert_infer.text.packing import PackedRows, pack_rows
from sbert_infer.text.shapes import choose_shapes

BUSY = 0.9  # what we ask of a GPU
SLOTS = 3  # as in sbert_infer/backends/tensorrt/backend.py
MAX_BATCH_TOKENS = 16384
_WINDOWS = 8
_CORES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96)
# English in a WordPiece vocabulary of 30,000: measured on the benchmark's texts.
_TOKENS_PER_WORD, _SPECIAL_TOKENS = 1.32, 2
# What may keep a GPU waiting -> the costs of a window, and of its batches.
_LIMITS = {
    "tokenizing": (["tokenize_s"], []),
    "Python": (["collect_s", "plan_s", "gather_s"], ["make_s", "take_s"]),
    "PCIe": ([], ["copy_in_s", "copy_out_s"]),
}

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


def plan_work(model: Model, workload: str, max_batch_tokens: int = MAX_BATCH_TOKENS, windows: int = _WINDOWS) -> Work:
    """Plan windows of a workload of the benchmark, in shapes chosen without calibration."""
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
            collect_s=len(lengths) * host.collect_text_s + int(lengths.sum()) * host.collect_s,
            plan_s=sum(batch.shape.rows for batch in batches) * host.plan_s,
            gather_s=len(lengths) * numbers * host.gather_s,
            batches=tuple(_batch_costs(work.model, batch, gpu, host) for batch in batches),
            pieces=host.pieces,
        )
        for lengths, batches in zip(work.lengths, work.windows, strict=True)
    ]


def forecast(work: Work, gpu: Gpu, host: HostCosts, cores: int, slots: int = SLOTS) -> Forecast:
    """Simulate the pipeline with `cores` for tokenizing."""
    windows = window_costs(work, gpu, host, cores)
    trace = simulate(windows, slots=slots)
    limit = bottleneck(windows, trace.busy("gpu"), slots)
    return Forecast(work.texts / trace.seconds, work.tokens / trace.seconds, trace.busy("gpu"), limit)


def cores_needed(work: Work, gpu: Gpu, host: HostCosts, slots: int = SLOTS) -> int | None:
    """Return how many cores of tokenizing keep the GPU busy; None if no number does."""
    return next((cores for cores in _CORES if _busy(work, gpu, host, cores, slots) >= BUSY), None)


def _busy(work: Work, gpu: Gpu, host: HostCosts, cores: int, slots: int) -> float:
    return simulate(window_costs(work, gpu, host, cores), slots=slots).busy("gpu")


def lone_text_s(model: Model, gpu: Gpu, host: HostCosts, tokens: int = 16) -> float:
    """Return the seconds from a text to its vector when nothing else runs."""
    shapes = choose_shapes(None, model.max_length, model.hidden, MAX_BATCH_TOKENS)
    lengths = np.array([tokens])
    costs = _batch_costs(model, pack_rows(lengths, shapes, model.hidden)[0], gpu, host)
    before = host.collect_text_s + tokens * (host.tokenize_s + host.collect_s) + host.plan_s
    on_gpu = costs.copy_in_s + costs.run_s + costs.copy_out_s
    return before + costs.make_s + on_gpu + costs.take_s


def bottleneck(windows: Sequence[WindowCosts], gpu_busy: float, slots: int = SLOTS) -> str:
    """Return the GPU if it is busy, or else what would make it busiest if it took no time."""
    if gpu_busy >= BUSY:
        return "GPU"
    busy = {
        name: simulate([_free(window, *costs) for window in windows], slots=slots).busy("gpu")
        for name, costs in _LIMITS.items()
    }
    return max(busy, key=lambda name: busy[name])


def _free(window: WindowCosts, own: Sequence[str], of_batches: Sequence[str]) -> WindowCosts:
    """Return the costs without some of the window's own and some of its batches'."""
    batches = tuple(replace(batch, **dict.fromkeys(of_batches, 0.0)) for batch in window.batches)
    return replace(window, **dict.fromkeys(own, 0.0), batches=batches)  # type: ignore[arg-type]


def _batch_costs(model: Model, batch: PackedRows, gpu: Gpu, host: HostCosts) -> BatchCosts:
    return BatchCosts(
        make_s=host.batch_s + host.make_s * batch.shape.tokens,
        copy_in_s=model.copy_in_s(batch.shape, gpu),
        run_s=model.run_s(batch.shape, gpu),
        copy_out_s=model.copy_out_s(batch.shape, gpu),
        take_s=host.take_s * len(batch.texts) * model.hidden,
    )


def _lengths(workload: str, rng: random.Random, longest: int) -> Lengths:
    words: Sequence[int] = [WORKLOADS[workload](rng) for _ in range(WINDOW_TEXTS)]
    tokens = np.round(_SPECIAL_TOKENS + _TOKENS_PER_WORD * np.array(words)).astype(np.int64)
    return np.minimum(tokens, longest)
