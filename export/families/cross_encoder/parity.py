"""The parity certificate of a cross-encoder: an artifact's scores compared with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sbert_infer.errors import ParityError
from sbert_infer.export.families.cross_encoder.reference import PairReference
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.verify.parity import excess, in_batches, mixed_batches, refusing_failures
from sbert_infer.export.verify.probe_texts import BESIDES, MAX_PROBE_LENGTH, ODD, SENTENCES, probe_texts
from sbert_infer.reranker import Reranker
from sbert_infer.types import Pair

Scores = npt.NDArray[np.float32]

_MAX_ERROR = 1e-3  # of FP32 scores, in their own standard deviation
_WORST = 8  # pairs that the error names
_SHOWN = 3  # of them in its message
_QUERY = "Why is the sky blue?"


@dataclass(frozen=True)
class ScoreCertificate:
    """How far the artifact's scores, before the activation, are from the reference's."""

    pairs: int
    max_length: int  # tokens of the longest pair compared
    max_abs: float
    spread: float  # standard deviation of the reference's scores, to compare `max_abs` with
    batch_max_abs: float  # the same pair alone and among pairs of other lengths
    correlation: float  # lowest over the labels
    rank_agreement: float  # share of couples of pairs that are in the same order, lowest over the labels
    threshold: float  # of the correlation


@dataclass(frozen=True)
class ExpectedScores:
    """The reference's scores of pairs, [pairs, labels]."""

    pairs: Sequence[Pair]
    lengths: Sequence[int]  # tokens of each pair, as far as the model takes it
    scores: Scores
    max_length: int


def probe_pairs(count_tokens: Callable[[Sequence[Pair]], list[int]], max_length: int) -> list[Pair]:
    """Pairs of each length to probe up to `max_length`, longer ones, odd ones and plain ones.

    `count_tokens` gives the number of tokens of each pair, special ones included, without
    truncation.
    """
    texts = probe_texts(lambda some: count_tokens([(_QUERY, text) for text in some]), max_length)
    longest = max(texts, key=len)
    follow = list(zip(SENTENCES, [*SENTENCES[1:], SENTENCES[0]], strict=True))
    odd = [(text, SENTENCES[index]) for index, text in enumerate([*ODD, *BESIDES])]
    long = [(longest, longest), (longest, _QUERY), (longest[: len(longest) // 2], longest)]
    same = [(text, text) for text in SENTENCES[::8]]
    return [*((_QUERY, text) for text in texts), *follow, *odd, *same, *long]


def expect_scores(reference: PairReference, pairs: Sequence[Pair], progress: Progress = no_progress) -> ExpectedScores:
    """Score `pairs` with the reference, once for all artifacts that are compared with it."""
    scores = reference.score(pairs, batch_size=8, progress=progress)  # small: hardly any padding
    if not np.isfinite(scores).all():
        raise ParityError("the checkpoint itself, in PyTorch, gives NaN or infinity; nothing was written")
    lengths = [int(reference.tokenize([pair])["attention_mask"].sum()) for pair in pairs]
    return ExpectedScores(pairs, lengths, scores, min(reference.checkpoint.max_length, MAX_PROBE_LENGTH))


def certify_scores(
    path: Path, expected: ExpectedScores, threshold: float, progress: Progress, *, exact: bool
) -> ScoreCertificate:
    """Compare the artifact at `path` with the reference's scores, alone and in mixed batches.

    Raises `ParityError`, with the worst pairs, if the correlation is below `threshold`, if a number
    is not finite, or if the artifact should be `exact`, as FP32 is, and a score is not.
    """
    pairs = expected.pairs
    with refusing_failures(), Reranker(path, on_truncate="ignore", threads=1, verify="never") as reranker:
        score = reranker.pipeline.run_together
        alone = in_batches(score, pairs, [[row] for row in range(len(pairs))], expected.lengths, progress)
        batches = mixed_batches([first + second for first, second in pairs])
        mixed = in_batches(score, pairs, batches, expected.lengths, progress)
    certificate = _compare(expected, alone, mixed, threshold)
    wrong = exact and not certificate.max_abs <= _MAX_ERROR * certificate.spread
    if wrong or not certificate.correlation >= threshold:
        errors = np.abs(np.stack([alone, mixed]) - expected.scores).max(axis=(0, 2))
        worst = [pairs[row] for row in np.argsort(-errors)[:_WORST]]
        times = float(excess(certificate.correlation, threshold))
        raise ParityError(_explain(certificate, errors, pairs), worst, times)
    return certificate


def _compare(expected: ExpectedScores, alone: Scores, mixed: Scores, threshold: float) -> ScoreCertificate:
    right = expected.scores
    labels = [(right[:, label], found[:, label]) for found in (alone, mixed) for label in range(right.shape[1])]
    return ScoreCertificate(
        pairs=len(right),
        max_length=expected.max_length,
        max_abs=float(np.abs(np.stack([alone, mixed]) - right).max()),
        spread=float(right.std(axis=0).mean()),
        batch_max_abs=float(np.abs(alone - mixed).max()),
        correlation=float(np.min([_correlation(a, b) for a, b in labels])),  # NaN if one is
        rank_agreement=float(np.min([_rank_agreement(a, b) for a, b in labels])),
        threshold=threshold,
    )


def _correlation(a: Scores, b: Scores) -> float:
    """The correlation of two lists of numbers; 1 if both are constant and equal."""
    x, y = a.astype(np.float64) - a.mean(), b.astype(np.float64) - b.mean()
    norm = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / norm if norm else float(np.array_equal(a, b))


def _rank_agreement(a: Scores, b: Scores) -> float:
    """The share of couples in the same order; couples nearly equal in `a` have no order."""
    difference = a[:, None] - a[None, :]
    ordered = difference > 1e-4 * (a.std() or 1.0)
    same = (b[:, None] - b[None, :])[ordered] > 0
    return float(same.mean()) if len(same) else 1.0


def _explain(certificate: ScoreCertificate, errors: Scores, pairs: Sequence[Pair]) -> str:
    worst = np.argsort(-errors)[:_SHOWN]
    lines = "".join(f"\n  {errors[row]:.2e}  {pairs[row]!r:.90}" for row in worst)
    return (
        f"the scores are too far from the reference's: correlation {certificate.correlation:.6f}, at least "
        f"{certificate.threshold} is needed, max-abs {certificate.max_abs:.2e} at a standard deviation of "
        f"{certificate.spread:.2e}; nothing was written. Worst pairs:{lines}"
    )
