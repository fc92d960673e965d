"""The parity certificate of a multi-vector encoder: its artifact's token vectors against the eager reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer._util.cores import usable_cores
from sbert_infer.encode.multi_vector import NO_ROLE
from sbert_infer.engine import Engine
from sbert_infer.errors import EngineError, ParityError
from sbert_infer.export.families.multi_vector.reference import MultiVectorReference
from sbert_infer.export.verify.parity import cannot_run, cosine
from sbert_infer.export.verify.probe_texts import MAX_PROBE_LENGTH
from sbert_infer.similarity import maxsim

__all__ = ["MultiVectorCertificate", "certify_multi_vector"]

Vectors = npt.NDArray[np.float32]

_SCORED = 32  # documents whose MaxSim scores are compared, too
_EVERY = 8  # texts that are also tried in no role


@dataclass(frozen=True)
class MultiVectorCertificate:
    """How far the artifact's token vectors are from the reference's, at worst and on average, in all roles."""

    texts: int
    max_length: int  # tokens of the longest text compared
    min_cosine: float
    mean_cosine: float
    max_abs: float
    batch_max_abs: float  # the same text alone and among others
    maxsim_max_abs: float  # of a query's score, which is a sum over its tokens
    threshold: float

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)


def certify_multi_vector(
    path: Path,
    reference: MultiVectorReference,
    texts: Sequence[str],
    threshold: float,
    progress: Callable[[int], object] = lambda count: None,
) -> MultiVectorCertificate:
    """Compare the artifact at `path` with `reference` on `texts`, in each role, alone and in batches.

    Raises `ParityError`, with the text, if a token's cosine is below `threshold`, or if other
    tokens get vectors.
    """
    cosines, errors, batch_errors, scored = [], [], [], {}
    for task in reference.multi_vector.roles:
        some = texts[::_EVERY] if task == NO_ROLE else texts  # it has nothing that documents do not have
        prompt = reference.checkpoint.prompts.get(task, "")
        expected = reference.encode(some, task, prompt=prompt)
        alone, together = _encode(path, some, task, prompt)
        progress(len(some) if task != NO_ROLE else 0)
        for text, right, *found in zip(some, expected, alone, together, strict=True):
            cosines += [_cosines(right, each, text, threshold) for each in found]
            errors += [float(np.abs(each - right).max(initial=0)) for each in found]
            batch_errors.append(float(np.abs(found[0] - found[1]).max(initial=0)))
        step = max(1, len(some) // _SCORED)
        scored[task] = expected[::step], together[::step]
    every = np.concatenate(cosines)
    scores = [
        maxsim(queries, documents) for queries, documents in zip(scored["query"], scored["document"], strict=True)
    ]
    return MultiVectorCertificate(
        texts=len(texts),
        max_length=min(reference.checkpoint.max_length, MAX_PROBE_LENGTH),
        min_cosine=float(every.min()),
        mean_cosine=float(every.mean()),
        max_abs=max(errors),
        batch_max_abs=max(batch_errors),
        maxsim_max_abs=float(np.abs(scores[0] - scores[1]).max()),
        threshold=threshold,
    )


def _encode(path: Path, texts: Sequence[str], task: str, prompt: str) -> tuple[list[Vectors], list[Vectors]]:
    """The artifact's vectors of each text alone, several calls at once, and of all texts in one call."""
    options: dict[str, Any] = {"prompt": prompt, "task": None if task == NO_ROLE else task}
    try:
        with Engine(path, on_truncate="ignore", threads=1) as engine, ThreadPoolExecutor(usable_cores()) as pool:
            alone = list(pool.map(lambda text: engine.encode(text, **options), texts))
            return alone, engine.encode(list(texts), **options)
    except EngineError as error:
        raise cannot_run(error) from error


def _cosines(right: Vectors, found: Vectors, text: str, threshold: float) -> npt.NDArray[np.float64]:
    if not np.isfinite(right).all():
        raise ParityError(
            f"the checkpoint itself, in PyTorch, gives NaN or infinity; nothing was written: {text!r:.90}"
        )
    if right.shape != found.shape:
        sizes = f"{len(right)} vectors of {right.shape[1]} numbers in PyTorch, {len(found)} of {found.shape[1]} here"
        raise ParityError(f"{sizes}; nothing was written. The text: {text!r:.90}")
    cosines = cosine(right, found) if right.size else np.empty(0)
    if not cosines.min(initial=1) >= threshold:
        raise ParityError(
            f"the lowest cosine of a token's vector to the reference's is {cosines.min():.6f}, at least {threshold} is "
            f"needed; nothing was written. The text: {text!r:.90}"
        )
    return cosines
