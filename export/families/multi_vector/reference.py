"""A multi-vector encoder as eager PyTorch in FP32, which its artifacts are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbert_infer.export.checkpoint.checkpoint import Checkpoint
from sbert_infer.export.checkpoint.modules import DenseSpec, ModuleSpec, read_weights
from sbert_infer.export.checkpoint.transformer import load_tokenizer
from sbert_infer.export.families.multi_vector.checkpoint import MultiVectorCheckpoint
from sbert_infer.export.families.multi_vector.roles import mark_prefixes
from sbert_infer.export.families.multi_vector.stanford_colbert import PROJECTION
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.reference.encoder import Dense, Encoder, batches_by_length, build_module, load_encoder

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tokens:
    """A batch of texts, each [batch, length]."""

    input_ids: Tensor
    attention_mask: Tensor  # the tokens that are attended to
    wanted: Tensor  # the tokens that get a vector


class MultiVectorReference(Encoder):
    """The transformer, and the modules on its token vectors."""

    checkpoint: MultiVectorCheckpoint

    def __init__(self, checkpoint: MultiVectorCheckpoint, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__(checkpoint, encoder, tokenizer)
        self.head = nn.Sequential(*(_build(spec, checkpoint, encoder) for spec in checkpoint.modules))
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[batch, length] twice -> [batch, length, dim]."""
        vectors: Tensor = self.head(self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state)
        return vectors

    def tokenize(self, texts: Sequence[str], task: str) -> Tokens:
        """Texts of a role: truncated to its limit, expanded if it asks for that, and padded."""
        role = self.checkpoint.roles[task]
        batch = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=role.max_length, return_tensors="pt"
        )
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if not ids.numel():  # empty texts, and a tokenizer without special tokens
            ids = mask = torch.zeros((len(texts), 1), dtype=torch.int64)
        wider = (0, max(0, role.expand_to - ids.shape[1]))
        ids, mask = F.pad(ids, wider, value=role.expansion_id), F.pad(mask, wider)
        added = (mask == 0) & (torch.arange(ids.shape[1]) < role.expand_to)
        ids = ids.masked_fill(added, role.expansion_id)
        wanted = (mask.bool() | added) & ~torch.isin(ids, torch.tensor(role.skip_ids, dtype=torch.int64))
        return Tokens(ids, mask.masked_fill(added, 1) if role.attend_to_expansion else mask, wanted)

    @torch.inference_mode()
    def encode(
        self,
        texts: Sequence[str],
        task: str,
        *,
        prompt: str = "",
        batch_size: int = 32,
        progress: Progress = no_progress,
    ) -> list[Vectors]:
        """The vectors of each text, [tokens, dim]. `progress` takes the number of texts done."""
        found: dict[int, Vectors] = {}
        for rows in batches_by_length([len(text) for text in texts], batch_size):
            tokens = self.tokenize([prompt + texts[i] for i in rows], task)
            vectors = self(tokens.input_ids, tokens.attention_mask)
            found |= {row: its[real].numpy() for row, its, real in zip(rows, vectors, tokens.wanted, strict=True)}
            progress(len(rows))
        return [found[row] for row in range(len(texts))]


def _build(spec: ModuleSpec, checkpoint: Checkpoint, encoder: nn.Module) -> nn.Module:
    """The module with its weights, which may be among the transformer's."""
    if isinstance(spec, DenseSpec) and spec.path == checkpoint.transformer_path:
        dense = Dense(spec)
        dense.load_state_dict({PROJECTION: read_weights(spec.path)[PROJECTION]})
        return dense
    return build_module(spec, encoder)


def load_multi_vector_reference(checkpoint: MultiVectorCheckpoint) -> MultiVectorReference:
    """Load the weights in FP32; raises `CheckpointError` if they do not fit the model."""
    # Stanford's layout keeps the projection among these weights. It may also have been left there
    # beside a modules.json, whose Dense is used instead.
    encoder = load_encoder(checkpoint, besides=(PROJECTION,))
    tokenizer = load_tokenizer(checkpoint)
    mark_prefixes(tokenizer, checkpoint.prefixes)
    return MultiVectorReference(checkpoint, encoder, tokenizer)
