"""The parity certificate of a multi-vector encoder: token vectors compared with the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sbert_infer._util.cores import usable_cores
from sbert_infer.encode.multi_vector import NO_ROLE
from sbert_infer.engine import Engine
from sbert_infer.errors import ParityError
from sbert_infer.export.families.multi_vector.reference import MultiVectorReference
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.verify.parity import Bounds, excess, refusing_failures
from sbert_infer.export.verify.probe_texts import MAX_PROBE_LENGTH, is_odd
from sbert_infer.similarity import cosine, maxsim

Vectors = npt.NDArray[np.float32]

_SCORED = 32  # documents whose MaxSim scores are compared as well
_WORST = 16  # results that the error names
_EVERY = 8  # one of so many texts is also compared without a role


@dataclass(frozen=True)
class MultiVectorCertificate:
    """How far the artifact's token vectors are from the reference's, over all roles."""

    texts: int
    max_length: int  # tokens of the longest text compared
    min_cosine: float  # of natural texts, as is the mean
    mean_cosine: float
    odd_min_cosine: float
    max_abs: float
    batch_max_abs: float  # the same text alone and among others
    maxsim_max_abs: float  # of a query's score, which is a sum over its tokens
    threshold: float


@dataclass(frozen=True)
class _Role:
    """Texts in one role, and the reference's vectors of each, [tokens, dim]."""

    task: str | None
    prompt: str
    texts: Sequence[str]
    vectors: list[Vectors]


@dataclass(frozen=True)
class ExpectedVectors:
    """The reference's vectors of texts in each role."""

    texts: int
    roles: dict[str, _Role]
    max_length: int

    def by_text(self) -> tuple[list[str], list[int], list[Vectors], list[str | None]]:
        """Every natural text in every role: with its prompt, its number of vectors, them, role."""
        every = [
            (role, text, found)
            for role in self.roles.values()
            for text, found in zip(role.texts, role.vectors, strict=True)
            if not is_odd(text)
        ]
        texts = [role.prompt + text for role, text, _ in every]
        vectors = [found for _, _, found in every]
        return texts, list(map(len, vectors)), vectors, [role.task for role, _, _ in every]


def expect_vectors(
    reference: MultiVectorReference, texts: Sequence[str], progress: Progress = no_progress
) -> ExpectedVectors:
    """Encode `texts` with the reference, once for all artifacts that are compared with it."""
    roles = {}
    for name in reference.checkpoint.roles:
        some = texts[::_EVERY] if name == NO_ROLE else texts  # it has nothing that documents do not have
        prompt = reference.checkpoint.prompts.get(name, "")
        done = no_progress if name == NO_ROLE else progress
        vectors = reference.encode(some, name, prompt=prompt, batch_size=8, progress=done)
        roles[name] = _Role(None if name == NO_ROLE else name, prompt, some, vectors)
    return ExpectedVectors(len(texts), roles, min(reference.checkpoint.max_length, MAX_PROBE_LENGTH))


def certify_multi_vector(
    path: Path, expected: ExpectedVectors, bounds: Bounds, progress: Progress = no_progress
) -> MultiVectorCertificate:
    """Compare the artifact at `path` with the reference in each role, alone and in batches.

    Raises `ParityError`, with the text, if a token's cosine is out of `bounds`, or if other tokens
    get vectors.
    """
    cosines, errors, batch_errors, scored = [], [], [], {}
    compared: list[str] = []  # the text of each of `cosines`
    for name, role in expected.roles.items():
        alone, together = _encode(path, role, progress if role.task else no_progress)
        for text, right, *found in zip(role.texts, role.vectors, alone, together, strict=True):
            cosines += [_cosines(right, each, text) for each in found]
            compared += [text] * len(found)
            errors += [float(np.abs(each - right).max(initial=0)) for each in found]
            batch_errors.append(float(np.abs(found[0] - found[1]).max(initial=0)))
        step = max(1, len(role.texts) // _SCORED)
        scored[name] = role.vectors[::step], together[::step]
    _check([float(each.min(initial=1)) for each in cosines], compared, bounds)
    odd = np.repeat([is_odd(text) for text in compared], [len(each) for each in cosines])
    every = np.concatenate(cosines)
    scores = [
        maxsim(queries, documents) for queries, documents in zip(scored["query"], scored["document"], strict=True)
    ]
    return MultiVectorCertificate(
        texts=expected.texts,
        max_length=expected.max_length,
        min_cosine=float(every[~odd].min()),
        mean_cosine=float(every[~odd].mean()),
        odd_min_cosine=float(every[odd].min(initial=1)),
        max_abs=max(errors),
        batch_max_abs=max(batch_errors),
        maxsim_max_abs=float(np.abs(scores[0] - scores[1]).max()),
        threshold=bounds.natural,
    )


def _encode(path: Path, role: _Role, progress: Progress) -> tuple[list[Vectors], list[Vectors]]:
    """The artifact's vectors of each text alone, several calls at once, and of all in one call."""
    with (
        refusing_failures(),
        Engine(path, on_truncate="ignore", threads=1, verify="never") as engine,
        ThreadPoolExecutor(usable_cores()) as pool,
    ):
        encode = partial(engine.encode, task=role.task, prompt=role.prompt, convert_to_numpy=True)
        alone = []
        for vectors in pool.map(lambda text: encode([text])[0], role.texts):
            alone.append(vectors)
            progress(1)
        together: Any = encode(list(role.texts))
        progress(len(together))
        return alone, together


def _cosines(right: Vectors, found: Vectors, text: str) -> npt.NDArray[np.float64]:
    if not np.isfinite(right).all():
        raise ParityError(
            f"the checkpoint itself, in PyTorch, gives NaN or infinity; nothing was written: {text!r:.90}"
        )
    if right.shape != found.shape:
        sizes = f"{len(right)} vectors of {right.shape[1]} numbers in PyTorch, {len(found)} of {found.shape[1]} here"
        raise ParityError(f"{sizes}; nothing was written. The text: {text!r:.90}")
    return cosine(right, found) if right.size else np.empty(0)


def _check(lowest: list[float], texts: list[str], bounds: Bounds) -> None:
    """Raise `ParityError` if a text's lowest cosine is out of `bounds`."""
    wanted = [bounds.for_text(text) for text in texts]
    times = excess(lowest, wanted)
    worst = np.argsort(-times)[:_WORST]
    first = int(worst[0])
    if not times[first] <= 1:
        raise ParityError(
            f"the lowest cosine of a token's vector to the reference's is {lowest[first]:.6f}, at least "
            f"{wanted[first]} is needed; nothing was written. The text: {texts[first]!r:.90}",
            dict.fromkeys(texts[row] for row in worst),
            float(times[first]),
        )
