"""Vectors against the right ones, and what was done differently, where the vectors tell.

A mistake is proven by making it here: with another prompt, cut to another limit or pooled otherwise
the vectors are the same. If none of these is it, the cosines tell rounding from another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sbert_infer.encode.self_check import COSINE, DIM, LENGTH, RIGHT, WRONG, Verdict, most_stretch, stretch
from sbert_infer.similarity import cosine
from sbert_infer.verify.truth import POOLINGS, Truth

Array = npt.NDArray[np.float32]
Cosines = npt.NDArray[np.float64]

# Limits that servers cut texts to: those of well-known models, and powers of two.
_LIMITS = (32, 64, 75, 100, 128, 200, 250, 256, 300, 384, 400, 500, 512, 768, 1000, 1024, 2048, 4096, 8192)
# Prompts of well-known models, tried besides the model's own.
_PROMPTS = (
    "query: ",
    "passage: ",
    "search_query: ",
    "search_document: ",
    "Represent this sentence for searching relevant passages: ",
)
_SOME = 16  # texts that prompts and poolings are tried on
_ROUNDED = 0.985  # mean cosine from which a difference looks like rounding: 8 bits have 0.99 or more
_UNRELATED = 0.3  # median cosine below which the vectors are those of an unrelated model


@dataclass(frozen=True)
class Difference:
    """What differs, in a word, and how."""

    what: str
    how: str


@dataclass(frozen=True)
class Comparison:
    """The cosine of each vector to the right one, and what differs; nothing if all are right.

    `verdict` is by the measure that fails.
    """

    cosines: Cosines
    differences: list[Difference]
    verdict: Verdict


def compare(truth: Truth, texts: Sequence[str], found: Array) -> Comparison:
    """Compare the vectors `found` for `texts` with the right ones."""
    right = truth.encode(texts)
    if found.shape[1] > right.shape[1]:
        how = f"its vectors have {found.shape[1]} numbers, those of the artifact {right.shape[1]}"
        verdict = Verdict(WRONG, len(texts), DIM, found.shape[1], right.shape[1])
        return Comparison(np.zeros(len(texts)), [Difference("model", how)], verdict)
    short = found.shape[1] < right.shape[1]
    how = f"only the first {found.shape[1]} of {right.shape[1]} numbers"
    cosines = cosine(right[:, : found.shape[1]], found)
    differences = list(_explain(truth, texts, found, right[:, : found.shape[1]], cosines))
    if short:
        same = not differences or differences[0].what != "model"
        kept = Difference("dimensions", how)
        differences = [kept, *differences] if same else [Difference("model", f"{differences[0].how}; {how}")]
    return Comparison(cosines, differences, _verdict(truth, found, right, cosines, differences))


def _verdict(truth: Truth, found: Array, right: Array, cosines: Cosines, differences: list[Difference]) -> Verdict:
    """Return the verdict by the measure that fails: cosines, numbers of a vector, or lengths."""
    verdict, lowest = WRONG if differences else RIGHT, float(cosines.min())
    if not differences or not lowest >= truth.bound:
        return Verdict(verdict, len(cosines), COSINE, lowest, truth.bound)
    if found.shape[1] < right.shape[1]:
        return Verdict(verdict, len(cosines), DIM, found.shape[1], right.shape[1])
    return Verdict(verdict, len(cosines), LENGTH, stretch(found, right), most_stretch(truth.bound))


def _explain(truth: Truth, texts: Sequence[str], found: Array, right: Array, cosines: Cosines) -> Iterator[Difference]:
    wrong = np.flatnonzero(~(cosines >= truth.bound))
    if not len(wrong):
        yield from _lengths(truth, found, right)
        return
    cause = _truncation(truth, texts, found, wrong)
    cause = cause or _prompt(truth, texts, found) or _pooling(truth, texts, found) or _by_cosine(truth, cosines)
    yield cause


def _lengths(truth: Truth, found: Array, right: Array) -> Iterator[Difference]:
    """Yield a difference if the vectors point the right way, but have other lengths."""
    ours, theirs = (np.linalg.norm(rows.astype(np.float64), axis=1) for rows in (right, found))
    ratios = theirs / np.maximum(ours, 1e-12)
    tolerance = most_stretch(truth.bound)
    if (np.abs(ratios - 1) <= tolerance).all():
        return
    if (np.abs(theirs - 1) <= tolerance).all():
        yield Difference("normalisation", "vectors are scaled to length 1, those of the artifact are not")
    elif (np.abs(ours - 1) <= tolerance).all():
        lengths = f"from {theirs.min():.3g} to {theirs.max():.3g}"
        yield Difference("normalisation", f"vectors are not scaled to length 1: they have lengths {lengths}")
    else:
        between = f"{ratios.min():.3g} and {ratios.max():.3g}"
        yield Difference("normalisation", f"vectors are between {between} times as long as the artifact's")


def _truncation(truth: Truth, texts: Sequence[str], found: Array, wrong: npt.NDArray[np.int64]) -> Difference | None:
    """Return a difference if only texts of more than some number of tokens are wrong."""
    counts = np.array([truth.count_tokens(text) for text in texts])
    right = np.setdiff1d(np.arange(len(texts)), wrong)
    longest, shortest = int(counts[right].max(initial=0)), int(counts[wrong].min())
    if not len(right) or longest >= shortest:
        return None
    some = [int(row) for row in wrong[:_SOME]]
    for limit in (limit for limit in _LIMITS if longest <= limit < min(shortest, truth.limit)):
        cut = truth.encode([texts[row] for row in some], limit=limit)[:, : found.shape[1]]
        if (cosine(cut, found[some]) >= truth.bound).all():
            return Difference("truncation", f"texts are cut to {limit} tokens, where the model takes {truth.limit}")
    where = f"texts of up to {longest} tokens are right, those of {shortest} or more are not"
    return Difference("truncation", f"{where}; the model takes {truth.limit} and cuts there")


def _prompt(truth: Truth, texts: Sequence[str], found: Array) -> Difference | None:
    """Return a difference if the vectors are those of texts with another prompt."""
    prompts = {"": "no prompt", **{prompt: f"the prompt {prompt!r}" for prompt in _PROMPTS}}
    prompts |= {prompt: f"the prompt {name!r}" for name, prompt in truth.engine.prompts.items() if prompt}
    for prompt, name in prompts.items():
        if prompt == truth.made.prompt:
            continue
        vectors = truth.encode(texts[:_SOME], prompt=prompt)[:, : found.shape[1]]
        if (cosine(vectors, found[:_SOME]) >= truth.bound).all():
            wanted = f"{truth.made.prompt!r}" if truth.made.prompt else "none"
            return Difference("prompt", f"vectors are those of texts with {name}, where {wanted} was expected")
    return None


def _pooling(truth: Truth, texts: Sequence[str], found: Array) -> Difference | None:
    """Return a difference if the vectors are those of another pooling, where that can be tried."""
    for pooling in POOLINGS if truth.can_pool else ():
        vectors = truth.pooled(texts[:_SOME], pooling)[:, : found.shape[1]]
        if (cosine(vectors, found[:_SOME]) >= truth.bound).all():
            own = "+".join(truth.engine.manifest.pooling)
            return Difference("pooling", f"vectors are those of {pooling} pooling, the model has {own}")
    return None


def _by_cosine(truth: Truth, cosines: Cosines) -> Difference:
    """Return what the cosines look like, if nothing that was tried gives these vectors."""
    figures = f"cosines from {cosines.min():.4f} to {cosines.max():.4f}"
    if cosines.mean() >= _ROUNDED:
        how = f"{figures}, as of another precision than {truth.engine.manifest.precision}"
        return Difference("precision", f"{how}: 8 bits, or rounded vectors")
    if np.median(cosines) < _UNRELATED:
        return Difference("model", f"{figures}: vectors of another model, or of other texts")
    how = f"{figures}: not rounding, and not an unrelated model"
    return Difference("pooling", f"{how}; another pooling or head, an unknown prompt, or weights trained further")
