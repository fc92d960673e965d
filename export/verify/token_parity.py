"""The token vectors of an artifact against those of the eager reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sbert_infer.artifact.manifest import TOKENS
from sbert_infer.backends.onnxruntime_session import FileModel, open_session
from sbert_infer.errors import ParityError
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.parity import cosine

__all__ = ["check_tokens"]


@torch.inference_mode()
def check_tokens(path: Path, reference: Reference, texts: Sequence[str], threshold: float) -> None:
    """Compare each token of `texts`. Raises `ParityError` if a cosine is below `threshold` or not a number."""
    session = open_session(FileModel(path), 1)
    for text in texts:
        ids, mask = reference.tokenize([text])
        expected = reference.token_vectors(ids, mask)[0].numpy()  # [length, width]
        found = session.run([TOKENS], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0][0]
        lowest = float(cosine(expected, found).min()) if np.isfinite(found).all() else float("nan")
        if not lowest >= threshold:
            raise ParityError(
                f"the lowest cosine of a token's vector to the reference's is {lowest:.6f}, at least {threshold} is "
                f"needed; nothing was written. The text: {text!r:.90}"
            )
