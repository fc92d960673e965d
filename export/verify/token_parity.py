"""What an artifact gives for each token, compared with the eager reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sbert_infer.artifact.manifest import MULTI, TOKENS, WEIGHTS
from sbert_infer.errors import ParityError
from sbert_infer.export.reference.bge_m3 import TokenHeads
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.candidate import open_outputs
from sbert_infer.export.verify.parity import Bounds
from sbert_infer.similarity import cosine

_MAX_ERROR = {"fp32": 1e-4, "bf16": 0.05, "int8": 0.1}  # of a token's weight, by precision


@torch.inference_mode()
def check_tokens(path: Path, reference: Reference, texts: Sequence[str], bounds: Bounds) -> None:
    """Compare each token's vector. Raises `ParityError` if a cosine is out of `bounds` or NaN."""
    run = open_outputs(path, TOKENS)
    for text in texts:
        ids, mask = reference.tokenize([text])
        expected = reference.token_vectors(ids, mask)[0].numpy()  # [length, width]
        found = run(ids.numpy(), mask.numpy())[0][0]
        lowest = float(cosine(expected, found).min()) if np.isfinite(found).all() else float("nan")
        if not lowest >= bounds.for_text(text):
            raise ParityError(
                f"the lowest cosine of a token's vector to the reference's is {lowest:.6f}, at least "
                f"{bounds.for_text(text)} is "
                f"needed; nothing was written. The text: {text!r:.90}"
            )


@torch.inference_mode()
def check_heads(
    path: Path, reference: Reference, heads: TokenHeads, texts: Sequence[str], bounds: Bounds, precision: str
) -> None:
    """Compare weight and vector of each token. Raises `ParityError` if one is too far off."""
    run = open_outputs(path, WEIGHTS, MULTI)
    for text in texts:
        ids, mask = reference.tokenize([text])
        weights, vectors = (output[0].numpy() for output in heads(reference.token_vectors(ids, mask)))
        found_weights, found_vectors = (output[0] for output in run(ids.numpy(), mask.numpy()))
        error, lowest = float(np.abs(weights - found_weights).max()), float(cosine(vectors, found_vectors).min())
        wanted = bounds.for_text(text)
        if not (error <= _MAX_ERROR[precision] * max(1.0, float(np.abs(weights).max())) and lowest >= wanted):
            raise ParityError(
                f"a token's weight is off by {error:.2e}, or its vector has a cosine of {lowest:.6f} to the "
                f"reference's, where {wanted} is needed; nothing was written. The text: {text!r:.90}"
            )
