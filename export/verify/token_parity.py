"""What an artifact gives for each token, compared with the eager reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sbert_infer.artifact.manifest import MULTI, TOKENS, WEIGHTS
from sbert_infer.errors import ParityError
from sbert_infer.export.reference.bge_m3 import TokenHeads
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import open_outputs
from sbert_infer.export.verify.parity import Bounds, excess
from sbert_infer.similarity import cosine

_WORST = 8  # texts that the error names
_MAX_ERROR = {"fp32": 1e-4, "bf16": 0.05, "int8": 0.1}  # of a token's weight, by precision


@torch.inference_mode()
def check_tokens(path: Path, reference: Reference, texts: Sequence[str], bounds: Bounds) -> None:
    """Compare each token's vector. Raises `ParityError` if a cosine is out of `bounds` or NaN."""
    run = open_outputs(path, TOKENS)
    lowest = []
    for text in texts:
        ids, mask = reference.tokenize([text])
        expected = reference.token_vectors(ids, mask)[0].numpy()  # [length, width]
        found = run(ids.numpy(), mask.numpy())[0][0]
        lowest.append(float(cosine(expected, found).min()) if np.isfinite(found).all() else float("nan"))
    wanted = [bounds.for_text(text) for text in texts]
    _refuse(texts, excess(lowest, wanted), lowest, wanted)


@torch.inference_mode()
def check_heads(
    path: Path, reference: Reference, heads: TokenHeads, texts: Sequence[str], bounds: Bounds, precision: str
) -> None:
    """Compare weight and vector of each token. Raises `ParityError` if one is too far off."""
    run = open_outputs(path, WEIGHTS, MULTI)
    errors, lowest, allowed = [], [], []
    for text in texts:
        ids, mask = reference.tokenize([text])
        weights, vectors = (output[0].numpy() for output in heads(reference.token_vectors(ids, mask)))
        found_weights, found_vectors = (output[0] for output in run(ids.numpy(), mask.numpy()))
        errors.append(float(np.abs(weights - found_weights).max()))
        allowed.append(_MAX_ERROR[precision] * max(1.0, float(np.abs(weights).max())))
        lowest.append(float(cosine(vectors, found_vectors).min()))
    wanted = [bounds.for_text(text) for text in texts]
    # The errors of weights are squared, since 1 - cosine goes with the square as well.
    times = np.maximum(excess(lowest, wanted), np.square(np.divide(errors, allowed)))
    _refuse(texts, times, lowest, wanted, [f"a token's weight is off by {error:.2e}, or " for error in errors])


def _refuse(
    texts: Sequence[str],
    times: npt.NDArray[np.float64],
    lowest: Sequence[float],
    wanted: Sequence[float],
    besides: Sequence[str] | None = None,
) -> None:
    """Raise `ParityError` if a text is `times` as far off as it may be, and more than once.

    `lowest` is each text's lowest cosine, and `besides` what else may be wrong with it.
    """
    worst = int(times.argmax())
    if times[worst] <= 1:
        return
    raise ParityError(
        f"{besides[worst] if besides else ''}the lowest cosine of a token's vector to the reference's is "
        f"{lowest[worst]:.6f}, at least {wanted[worst]} is needed; nothing was written. "
        f"The text: {texts[worst]!r:.90}",
        [texts[row] for row in np.argsort(-times)[:_WORST]],
        float(times[worst]),
    )
