"""bge-m3's two layers beside the encoder: a weight for each token, and a vector for each token.

They are saved as `sparse_linear.pt` and `colbert_linear.pt` next to what sentence-transformers
reads, which knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.artifact.manifest import MULTI, WEIGHTS
from sbert_infer.backends.onnxruntime_session import FileModel, open_session
from sbert_infer.errors import CheckpointError, ExportError, ParityError
from sbert_infer.export.checkpoint.hub import first_line
from sbert_infer.export.checkpoint.modules import Problems
from sbert_infer.export.reference.encoder import Reference
from sbert_infer.export.verify.parity import cosine

__all__ = ["TokenHeads", "check_heads", "load_heads", "unweighted_ids"]

_MAX_ERROR = {"fp32": 1e-4, "int8": 0.1}  # of a token's weight


class TokenHeads(nn.Module):
    """Both layers."""

    outputs = (WEIGHTS, MULTI)

    def __init__(self, sparse: dict[str, Tensor], multi: dict[str, Tensor]) -> None:
        super().__init__()
        width = multi["weight"].shape[1]
        self.sparse, self.multi = nn.Linear(width, 1), nn.Linear(width, multi["weight"].shape[0])
        self.sparse.load_state_dict(sparse)
        self.multi.load_state_dict(multi)
        self.eval()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, length, width] -> weights [batch, length], and vectors of length 1, [batch, length, dim]."""
        return self.sparse(tokens).relu().squeeze(-1), F.normalize(self.multi(tokens), dim=-1)


def load_heads(reference: Reference) -> TokenHeads:
    """The layers of the checkpoint. Raises `CheckpointError` if a file is missing, or not what it should be."""
    checkpoint = reference.checkpoint
    if not reference.layers or reference.layer_pooling is not None:
        raise ExportError(f"{checkpoint.name}: --outputs sparse,multi is for the last layer of a transformer")
    config: Any = reference.encoder.config
    problems: Problems = []
    sparse = _read(checkpoint.path / "sparse_linear.pt", config.hidden_size, 1, problems)
    multi = _read(checkpoint.path / "colbert_linear.pt", config.hidden_size, None, problems)
    if problems:
        raise CheckpointError(checkpoint.source, problems)
    return TokenHeads(sparse, multi)


def _read(file: Path, width: int, dim: int | None, problems: Problems) -> dict[str, Tensor]:
    """Weight and bias of a layer, in FP32."""
    if not file.is_file():
        problems.append(f"{file.name} is missing, and --outputs sparse,multi needs it")
        return {}
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)  # no code of the file's choosing runs
    except Exception as error:  # a damaged file may raise anything
        problems.append(f"{file.name} can't be read safely as plain tensors: {first_line(error)}")
        return {}
    found = found if isinstance(found, dict) else {}
    tensors = {str(key): tensor.float() for key, tensor in found.items() if isinstance(tensor, Tensor)}
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    rows = dim or (shapes.get("weight") or [0])[0]
    if shapes != {"weight": [rows, width], "bias": [rows]} or len(found) != len(shapes):
        problems.append(f"{file.name} must hold a weight [{dim or 'n'}, {width}] and its bias, not {shapes}")
    return tensors


def unweighted_ids(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that have no weight in a sparse vector: those that begin, end or fill up a text, or are unknown."""
    ids = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    return tuple(sorted(id for id in ids if id is not None))


@torch.inference_mode()
def check_heads(
    path: Path, reference: Reference, heads: TokenHeads, texts: Sequence[str], threshold: float, precision: str
) -> None:
    """Compare weight and vector of each token of `texts`. Raises `ParityError` if one is too far off."""
    session = open_session(FileModel(path), 1)
    for text in texts:
        ids, mask = reference.tokenize([text])
        weights, vectors = (output[0].numpy() for output in heads(reference.token_vectors(ids, mask)))
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
        found_weights, found_vectors = (output[0] for output in session.run([WEIGHTS, MULTI], inputs))
        error, lowest = float(np.abs(weights - found_weights).max()), float(cosine(vectors, found_vectors).min())
        if not (error <= _MAX_ERROR[precision] * max(1.0, float(np.abs(weights).max())) and lowest >= threshold):
            raise ParityError(
                f"a token's weight is off by {error:.2e}, or its vector has a cosine of {lowest:.6f} to the "
                f"reference's, of which {threshold} is needed; nothing was written. The text: {text!r:.90}"
            )
