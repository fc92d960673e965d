"""The parity certificate: vectors of an artifact or of a graph, compared with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from sbert_infer._util.cores import usable_cores
from sbert_infer.errors import EngineError, ParityError
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import Candidate, EngineCandidate
from sbert_infer.export.verify.probe_texts import MAX_PROBE_LENGTH, is_odd
from sbert_infer.similarity import cosine, unit_rows

Vectors = npt.NDArray[np.float32]
Item = TypeVar("Item")  # a text, or a pair of texts

# By precision. BF16 rounds to 8 bits where FP16 rounds to 11, and 1 - cosine goes with the square
# of that. In a plan all arithmetic is BF16: on MiniLM 1.5e-4 at worst, and 2.3e-6 in FP16.
MIN_COSINE = {"fp32": 0.9999, "bf16": 0.9995, "int8": 0.985}
MIN_COSINE_OF_PLANS = {"fp16": 0.999, "bf16": 0.995}
# Of odd texts, such as literal special tokens or runs of emoji, in precisions that round coarsely:
# what matters to people are the texts that they write.
_ODD_MIN_COSINE = {"bf16": 0.99, "int8": 0.9}
_NEIGHBOURS = 10
_MIXED = 8  # texts of different lengths in a batch
_SPAN = 64  # texts, neighbours by length, that a mixed batch is drawn from
_MIXED_CHARACTERS = 32_768  # of a mixed batch with its padding: attention's memory may grow with their square
_WORST = 16  # results that the error names, of texts alone and mixed
_SHOWN = 3  # of them in its message
_WITH_PROMPT = 20  # texts that are also compared with each prompt


@dataclass(frozen=True)
class Certificate:
    """How far the artifact's vectors are from the reference's, at worst and on average.

    The cosines are those of natural texts, but for the one of odd texts.
    """

    texts: int
    max_length: int  # tokens of the longest text compared
    min_cosine: float
    mean_cosine: float
    odd_min_cosine: float
    max_abs: float
    batch_max_abs: float  # the same text alone and among texts of other lengths
    top10_overlap: float  # share of each text's ten nearest neighbours that stay the same
    threshold: float


@dataclass(frozen=True)
class Bounds:
    """The lowest cosines to accept, of natural texts and of odd ones."""

    natural: float
    odd: float

    @classmethod
    def everywhere(cls, lowest: float) -> Bounds:
        """The same for all texts."""
        return cls(lowest, lowest)

    @classmethod
    def of(cls, precision: str, min_cosine: float | None = None) -> Bounds:
        """The bounds of an ONNX file in `precision`, or `min_cosine` for what is not odd."""
        natural = MIN_COSINE[precision] if min_cosine is None else min_cosine
        return cls(natural, min(natural, _ODD_MIN_COSINE.get(precision, natural)))

    def for_text(self, text: str) -> float:
        """The bound for `text`."""
        return self.odd if is_odd(text) else self.natural


@dataclass(frozen=True)
class Expected:
    """The reference's vectors of texts, without and with each of the model's prompts."""

    texts: Sequence[str]
    lengths: Sequence[int]  # tokens of each text, as far as the model takes it
    vectors: Vectors
    prompted: tuple[tuple[str, Sequence[str], Vectors], ...]  # prompt, some of the texts, their vectors
    max_length: int


def certify(path: Path, expected: Expected, bounds: Bounds, progress: Progress = no_progress) -> Certificate:
    """Compare the artifact at `path` with the reference's vectors, alone and in mixed batches.

    Raises `ParityError`, with the worst texts, if a cosine is out of `bounds` or a number is not
    finite.
    """
    with refusing_failures(), closing(EngineCandidate(path, threads=1)) as candidate:
        return compare(candidate, expected, bounds, progress)


def expect(reference: Reference, texts: Sequence[str], progress: Progress = no_progress) -> Expected:
    """Encode `texts` with the reference, once for all candidates that are compared with it."""
    vectors = reference.encode(texts, batch_size=_MIXED, progress=progress)  # small: hardly any padding
    _check_finite(vectors, texts)
    some = texts[:: max(1, len(texts) // _WITH_PROMPT)]
    prompts = sorted({prompt for prompt in reference.checkpoint.prompts.values() if prompt})
    prompted = tuple((prompt, some, reference.encode(some, prompt=prompt)) for prompt in prompts)
    lengths = [int(reference.tokenize([text])[1].sum()) for text in texts]
    return Expected(texts, lengths, vectors, prompted, min(reference.checkpoint.max_length, MAX_PROBE_LENGTH))


def compare(candidate: Candidate, expected: Expected, bounds: Bounds, progress: Progress = no_progress) -> Certificate:
    """Let `candidate` encode each text alone, in mixed batches and with each prompt.

    Raises as `certify` does.
    """
    texts, lengths, vectors = expected.texts, expected.lengths, expected.vectors
    with refusing_failures():
        alone = in_batches(candidate.encode, texts, [[row] for row in range(len(texts))], lengths, progress)
        mixed = in_batches(candidate.run_together, texts, mixed_batches(texts), lengths, progress)
        prompted = [(some, right, candidate.encode(some, prompt)) for prompt, some, right in expected.prompted]
    pairs = [(texts, vectors, alone), (texts, vectors, mixed), *prompted]
    everything = [text for group, _, _ in pairs for text in group]
    cosines = np.concatenate([cosine(a, b) for _, a, b in pairs])
    odd = np.array([is_odd(text) for text in everything])
    certificate = Certificate(
        texts=len(texts),
        max_length=expected.max_length,
        min_cosine=float(cosines[~odd].min(initial=1)),
        mean_cosine=float(cosines[~odd].mean()) if not odd.all() else 1.0,
        odd_min_cosine=float(cosines[odd].min(initial=1)),
        max_abs=max(float(np.abs(a - b).max()) for _, a, b in pairs),
        batch_max_abs=float(np.abs(alone - mixed).max()),
        top10_overlap=_overlap(vectors, alone),
        threshold=bounds.natural,
    )
    wanted = np.where(odd, bounds.odd, bounds.natural)
    if not (cosines >= wanted).all():
        times = excess(cosines, wanted)
        worst = [int(row) for row in np.argsort(-times)[:_WORST]]
        message = _explain(certificate, cosines, wanted, everything, worst)
        raise ParityError(message, dict.fromkeys(everything[row] for row in worst), float(times.max()))
    return certificate


def excess(cosines: npt.ArrayLike, wanted: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """How many times as far from 1 each cosine is as the one that is `wanted`."""
    times = (1 - np.asarray(cosines)) / np.maximum(1 - np.asarray(wanted), 1e-9)
    return np.where(np.isnan(times), np.inf, times)


@contextmanager
def refusing_failures() -> Iterator[None]:
    """Raise `ParityError` where a candidate fails."""
    try:
        yield
    except EngineError as error:
        raise ParityError(f"the converted model can't run: {error}; nothing was written") from error


def _check_finite(vectors: Vectors, texts: Sequence[str]) -> None:
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        shown = "".join(f"\n  {texts[row]!r:.90}" for row in bad[:_SHOWN])
        raise ParityError(
            f"the checkpoint itself, in PyTorch, gives NaN or infinity for {len(bad)} of {len(texts)} texts; "
            f"nothing was written. The first:{shown}"
        )


def in_batches(
    encode: Callable[[list[Item]], Vectors],
    texts: Sequence[Item],
    batches: Sequence[list[int]],
    lengths: Sequence[int],
    progress: Progress,
) -> Vectors:
    """The vectors of `texts`, with one call of `encode` for each batch, several calls at once.

    `progress` takes the tokens of each batch; `lengths` are those of the texts.
    """
    vectors: dict[int, Vectors] = {}
    with ThreadPoolExecutor(usable_cores()) as pool:
        encoded = pool.map(lambda rows: encode([texts[row] for row in rows]), batches)
        for rows, result in zip(batches, encoded, strict=True):
            vectors |= zip(rows, result, strict=True)
            progress(sum(lengths[row] for row in rows))
    return np.stack([vectors[row] for row in range(len(texts))])


def mixed_batches(texts: Sequence[str]) -> list[list[int]]:
    """Batches of different lengths, each drawn from a span of neighbours, and one of extremes.

    Batches of long texts are smaller, but never of one text alone.
    """
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    stride = _SPAN // _MIXED
    spans = [order[start : start + _SPAN] for start in range(0, len(order), _SPAN)]
    batches = [span[start::stride] for span in spans for start in range(min(stride, len(span)))]
    return [part for batch in [*batches, order[:4] + order[-4:]] for part in _parts(batch, texts)]


def _parts(batch: list[int], texts: Sequence[str]) -> list[list[int]]:
    """Halve `batch`, with short and long texts in each half, until every part is small enough."""
    longest = max(len(texts[row]) for row in batch)
    if len(batch) <= 3 or len(batch) * longest <= _MIXED_CHARACTERS:
        return [batch]
    return [*_parts(batch[::2], texts), *_parts(batch[1::2], texts)]


def _overlap(a: Vectors, b: Vectors) -> float:
    """Mean share of common neighbours, among distinct vectors only, since equal ones make ties."""
    _, rows = np.unique(a.round(4), axis=0, return_index=True)
    nearest = [np.argsort(-_similarities(x[rows]), axis=1)[:, :_NEIGHBOURS] for x in (a, b)]
    shared = [len(set(x) & set(y)) / len(x) for x, y in zip(*nearest, strict=True)]
    return float(np.mean(shared))


def _similarities(x: Vectors) -> Vectors:
    unit = unit_rows(x)
    scores: Vectors = unit @ unit.T
    np.fill_diagonal(scores, -np.inf)
    return scores


def _explain(
    certificate: Certificate,
    cosines: npt.NDArray[np.float64],
    wanted: npt.NDArray[np.float64],
    texts: list[str],
    worst: list[int],
) -> str:
    lines = "".join(f"\n  {cosines[row]:.6f}  {texts[row]!r:.90}" for row in worst[:_SHOWN])
    return (
        f"the lowest cosine to the reference is {cosines[worst[0]]:.6f}, at least {wanted[worst[0]]} is "
        f"needed (mean {certificate.mean_cosine:.6f}, max-abs {certificate.max_abs:.2e}); nothing was written."
        f" Worst texts:{lines}"
    )
