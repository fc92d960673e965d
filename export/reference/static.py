"""Static embeddings as eager PyTorch, each with the interface of a transformer without layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from sbert_infer.export.checkpoint.static import read_table


class StaticEncoder(nn.Module):
    """The table of a StaticEmbedding: each token becomes its vector."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        table = read_table(folder)
        self.embedding = nn.Embedding(table.shape[0], table.shape[1], _weight=table)
        self.config = SimpleNamespace(num_hidden_layers=0, _attn_implementation=None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """[batch, length] -> token vectors [batch, length, width]."""
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


class WordEncoder(nn.Module):
    """The input of a SparseStaticEmbedding: each token becomes its own id."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=0, _attn_implementation=None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """[batch, length] -> [batch, length, 1]."""
        return SimpleNamespace(last_hidden_state=input_ids.unsqueeze(-1))
