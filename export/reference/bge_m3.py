"""bge-m3's two additional layers: one gives a weight for each token, the other a vector.

They are saved as `sparse_linear.pt` and `colbert_linear.pt` beside the files that
sentence-transformers reads; sentence-transformers ignores them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.artifact.manifest import MULTI, WEIGHTS
from sbert_infer.errors import CheckpointError, ExportError
from sbert_infer.export.checkpoint.hub import first_line
from sbert_infer.export.checkpoint.modules import Problems
from sbert_infer.export.reference.encoder import Reference


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
        """[batch, length, width] -> weights [batch, length], unit vectors [batch, length, dim]."""
        return self.sparse(tokens).relu().squeeze(-1), F.normalize(self.multi(tokens), dim=-1)


def load_heads(reference: Reference) -> TokenHeads:
    """Load the checkpoint's layers. Raises `CheckpointError` if a file is missing or invalid."""
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
        found = torch.load(file, map_location="cpu", weights_only=True)  # runs no code from the file
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
    """Tokens without a weight in a sparse vector: begin, end, padding and unknown."""
    ids = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    return tuple(sorted(id for id in ids if id is not None))
