"""The self-check: an artifact's canaries, run on this machine, against the eager model's vectors.

It runs when an artifact is first opened on a machine with a backend. That its vectors were right is
kept in the user's cache, and in this process; that they were wrong is not, so that a cure is seen.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import tokenizers

from sbert_infer._util.hardware import cpu_name, instruction_sets
from sbert_infer.artifact.canaries import Canaries, canaries_of
from sbert_infer.artifact.manifest import MULTI_VECTOR, RERANKER, SPARSE_ENCODER, Artifact, Manifest
from sbert_infer.backends.base import Array, Backend
from sbert_infer.backends.devices import gpu_indices
from sbert_infer.backends.tensorrt import cuda
from sbert_infer.backends.tensorrt.build_cache import engine_key, keep_verdict, kept_verdict
from sbert_infer.backends.tensorrt.cuda_packages import version
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.encode.multi_vector import MultiVectorOutput
from sbert_infer.encode.open_pipeline import load_tokenizer, make_pipeline
from sbert_infer.encode.options import EncodeOptions
from sbert_infer.encode.output import Output, Window
from sbert_infer.encode.pipeline import Pipeline
from sbert_infer.encode.sparse import SparseOutput, SparseRows
from sbert_infer.errors import TextError, WrongVectorsError
from sbert_infer.similarity import cosine
from sbert_infer.text.tokenizer import Tokenizer

Verify = Literal["once", "always", "never"]

RIGHT, WRONG, NO_CANARIES, NOT_CHECKED = "right", "wrong", "no canaries", "not checked"

# How far vectors may be from the eager model's, whatever the certificate says: 1 - cosine, and a
# reranker's score in standard deviations. FP32 on CPUs is far below this; on a GPU it may be
# TF32. The certificate of a BF16 file may be one of FP32, and that of a plan is of an emulation.
_ROOM = {
    "fp32": (5e-6, 2e-3),
    "fp32 on a GPU": (1e-4, 0.05),
    "bf16": (1e-3, 0.2),
    "fp16": (1e-3, 0.1),
    "int8": (1e-3, 0.05),
}
_MORE = 2.0  # times the certificate's own worst
_ALONE = 4  # one of so many texts also runs alone
_VERSION = 1  # of this check: another one asks again

_seen: dict[str, Verdict] = {}  # what this process has found or read, also if nothing can be kept


@dataclass(frozen=True)
class Verdict:
    """What the self-check found: the value of `engine.info["verified"]`."""

    verdict: str
    texts: int = 0
    measure: str = ""  # what `found` is, which must be at least or at most `bound`
    found: float = 0.0
    bound: float = 0.0

    def __str__(self) -> str:
        return f"{self.verdict}: {self.measured}" if self.texts else self.verdict

    @property
    def measured(self) -> str:
        """What was measured, and what would be right."""
        side = _SIDES.get(self.measure, "at most")
        numbers = f"{self.measure} {_number(self.found)}, {side} {_number(self.bound)} is right"
        return f"{numbers}, on {self.texts} texts"


COSINE, LENGTH, SCORE = "lowest cosine", "largest difference in length", "largest difference of a score"
FINITE, DIM = "texts with NaN or infinity in their batches", "numbers of a vector"
_SIDES = {COSINE: "at least", DIM: "exactly"}


class SelfCheck:
    """Checks the backends that are tried for an artifact; `verdict` is that of the last one."""

    def __init__(self, artifact: Artifact, verify: Verify, tokenizer: Tokenizer | None = None) -> None:
        if verify not in get_args(Verify):
            raise ValueError(f"verify must be one of {', '.join(get_args(Verify))}, got {verify!r}")
        self.verify: Verify = verify
        self.verdict = Verdict(NOT_CHECKED)
        self._artifact, self._tokenizer = artifact, tokenizer

    def __call__(self, backend: Backend) -> None:
        """Raise `WrongVectorsError` if `backend` gives wrong vectors here."""
        if self.verify == "never" or self._artifact.manifest.canaries is None:
            self.verdict = Verdict(NOT_CHECKED if self.verify == "never" else NO_CANARIES)
            return
        key = _key(self._artifact, backend)
        known = _recall(key) if self.verify == "once" else None
        self.verdict = known or self._run(backend)
        if self.verdict.verdict == WRONG:
            raise WrongVectorsError(f"{backend.describe()} gives wrong vectors here: {self.verdict.measured}")
        if known is None:
            _remember(key, self.verdict)

    def _run(self, backend: Backend) -> Verdict:
        canaries = canaries_of(self._artifact)
        assert canaries is not None  # noqa: S101  # as `__call__` has seen
        self._tokenizer = self._tokenizer or load_tokenizer(self._artifact)
        with closing(make_pipeline(self._artifact, self._tokenizer, backend)) as pipeline:
            found = run_canaries(pipeline, self._artifact.manifest, canaries)
        return judge(self._artifact.manifest, backend.device, canaries, found)


def run_canaries(pipeline: Pipeline, manifest: Manifest, canaries: Canaries) -> list[tuple[int, Array]]:
    """Run all canaries together and some of them alone; return (number, result) of each.

    If there are NaN or infinity in a call, all its results are NaN: so `Engine` would raise.
    """
    everything = range(len(canaries.texts))
    found = list(_run_rows(pipeline, manifest, canaries, everything))
    for row in everything[::_ALONE]:
        found += _run_rows(pipeline, manifest, canaries, [row])
    return found


def _run_rows(
    pipeline: Pipeline, manifest: Manifest, canaries: Canaries, rows: Sequence[int]
) -> Iterator[tuple[int, Array]]:
    for task in dict.fromkeys(canaries.tasks[row] for row in rows):
        own = [row for row in rows if canaries.tasks[row] == task]
        output = first_output(manifest, task, pipeline.tokenizer)
        try:
            windows = pipeline.run([canaries.texts[row] for row in own], output)
            results = [result for window in windows for result in _results(window)]
        except TextError as error:
            if not error.not_finite:
                raise
            yield from ((row, np.full_like(canaries.results[row], np.nan)) for row in own)
            continue
        yield from ((row, np.atleast_2d(result)) for row, result in zip(own, results, strict=True))


def _results(window: Window) -> Any:
    return window.vectors.to_dense() if isinstance(window.vectors, SparseRows) else window.vectors


def first_output(manifest: Manifest, task: str | None, tokenizer: Tokenizer) -> Output:
    """Return all numbers of the graph's first output, as the reference gave them."""
    if manifest.kind == SPARSE_ENCODER:
        return SparseOutput(manifest, manifest.dim)
    if manifest.kind == MULTI_VECTOR:
        options = EncodeOptions(task=task, convert_to_numpy=True)  # tensors would need torch
        return MultiVectorOutput(manifest, options, None, tokenizer)
    return DenseOutput(manifest)


def judge(manifest: Manifest, device: str, canaries: Canaries, found: Sequence[tuple[int, Array]]) -> Verdict:
    """Compare results with the eager model's, by bounds that fit the precision."""
    pairs = [(result, canaries.results[row]) for row, result in found]
    texts = len(canaries.texts)
    if any(ours.shape != right.shape for ours, right in pairs):
        return Verdict(WRONG, texts, COSINE, 0.0, 1.0)
    if spoiled := {row for row, result in found if not np.isfinite(result).all()}:
        return Verdict(WRONG, texts, FINITE, len(spoiled), 0)
    ours, right = (np.concatenate(each) for each in zip(*pairs, strict=True))
    least, score = bounds_of(manifest, device)
    if manifest.kind == RERANKER:
        error = float(np.abs(ours - right).max())
        return Verdict(RIGHT if error <= score else WRONG, texts, SCORE, error, score)
    lowest = float(cosine(ours, right).min())
    if not lowest >= least:
        return Verdict(WRONG, texts, COSINE, lowest, least)
    length, most = stretch(ours, right), most_stretch(least)
    if not length <= most:
        return Verdict(WRONG, texts, LENGTH, length, most)
    return Verdict(RIGHT, texts, COSINE, lowest, least)


def bounds_of(manifest: Manifest, device: str) -> tuple[float, float]:
    """Return the lowest cosine, and the largest difference of a score, that are right here."""
    parity, precision = manifest.parity, manifest.precision
    on_gpu = precision == "fp32" and device != "cpu"
    room, score_room = _ROOM["fp32 on a GPU" if on_gpu else precision]
    worst = 1 - float(parity.get("min_cosine", 1.0))
    if precision == "int8":  # its errors are those of the weights, which the certificate knows
        room += _MORE * worst
    else:
        asked = 0.0 if precision == "fp32" else 1 - float(parity.get("threshold", 1.0))
        room = max(room, _MORE * worst, _MORE * asked)
    score = _MORE * float(parity.get("max_abs", 0.0)) + score_room * max(float(parity.get("spread", 0.0)), 1e-3)
    return 1 - room, score


def most_stretch(least: float) -> float:
    """Return the largest relative difference in length that goes with a cosine of at least `least`.

    An error that turns a vector by so much may as well stretch it by so much.
    """
    return 2 * float(np.sqrt(2 * (1 - least)))


def stretch(ours: Array, right: Array) -> float:
    """Return the largest relative difference in length."""
    a, b = (np.linalg.norm(rows.astype(np.float64), axis=1) for rows in (ours, right))
    known = b > 0
    return float(np.abs(a[known] / b[known] - 1).max(initial=0))


def _number(value: float) -> str:
    """Return enough digits to tell a cosine near 1 from 1."""
    return f"{value:.7f}".rstrip("0").rstrip(".") if value >= 1e-3 or not value else f"{value:.1e}"


def _key(artifact: Artifact, backend: Backend) -> str:
    """Return a name for all that the vectors depend on, besides the texts."""
    software = (tokenizers.__version__, backend.describe())
    return engine_key("canaries", _VERSION, artifact.sha256, *software, *_machine(backend.device))


@functools.cache
def _machine(device: str) -> tuple[Any, ...]:
    """Return the kind of CPU or GPU, and the versions of what else computes there."""
    if device == "cpu":
        return version("sbert-infer"), cpu_name(), *instruction_sets()
    packages = map(version, ("sbert-infer", "torch", "triton"))  # which run the kernel
    return *packages, cuda.driver_cuda(), cuda.driver_release(), *map(cuda.device_name, gpu_indices(device.split(",")))


def _recall(key: str) -> Verdict | None:
    if key not in _seen:
        with suppress(RuntimeError, ValueError, TypeError):  # no home folder; the file of another version
            if (kept := kept_verdict(key)) is not None:
                _seen[key] = Verdict(**json.loads(kept))
    return _seen.get(key)


def _remember(key: str, verdict: Verdict) -> None:
    _seen[key] = verdict
    with suppress(RuntimeError):  # no home folder
        keep_verdict(key, json.dumps(asdict(verdict)).encode())
