"""StaticEmbedding (model2vec, potion): no transformer, a table of token vectors whose mean is the sentence vector.

Its tokens are those of the text alone, without special ones, and of an empty text there are none:
its vector is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from sbert_infer.export.checkpoint.hub import first_line
from sbert_infer.export.checkpoint.modules import Problems, read_weights

__all__ = ["MODEL_TYPE", "UNLIMITED", "StaticEncoder", "StaticTokenizer", "read_static"]

MODEL_TYPE = "static"
UNLIMITED = 2**20  # tokens: sentence-transformers sets no limit, and an artifact has to


def read_static(folder: Path, name: str, problems: Problems) -> tuple[int, int]:
    """Check the table and the tokenizer saved in `folder`; the width of the vectors and the length limit."""
    before = len(problems)
    try:
        table = _table(read_weights(folder))
    except ValueError as error:
        problems.append(f"{name}: {error}")
    try:
        tokenizer = StaticTokenizer(folder)
    except Exception as error:  # tokenizers raises nothing more precise
        problems.append(f"{name}: tokenizer.json can't be read: {first_line(error)}")
    if len(problems) > before:
        return 1, UNLIMITED
    largest = max(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= len(table):
        problems.append(f"{name}: the tokenizer has the token {largest}, but there are vectors for {len(table)} only")
    return table.shape[1], tokenizer.model_max_length


def _table(weights: dict[str, Tensor]) -> Tensor:
    """One row for each token, in FP32; raises ValueError.

    model2vec may store fewer rows, with a `mapping` from tokens to them, and a factor for each
    token, its `weights`.
    """
    known = {"embedding.weight"} if "embedding.weight" in weights else {"embeddings", "mapping", "weights"}
    if unknown := sorted(weights.keys() - known):
        raise ValueError(f"unknown tensor '{unknown[0]}' in the weights")
    rows = weights.get("embedding.weight", weights.get("embeddings"))
    if rows is None or rows.ndim != 2:
        raise ValueError("the weights hold no table 'embedding.weight' or 'embeddings'")
    if "mapping" in weights:
        rows = rows[weights["mapping"].long()]
    table = rows.float()
    return table * weights["weights"].float()[:, None] if "weights" in weights else table


class StaticEncoder(nn.Module):
    """The table, in the shape of a transformer without layers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        table = _table(read_weights(folder))
        self.embedding = nn.Embedding(table.shape[0], table.shape[1], _weight=table)
        self.config = SimpleNamespace(num_hidden_layers=0, _attn_implementation=None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """[batch, length] -> token vectors [batch, length, width]."""
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


class StaticTokenizer:
    """The tokenizer as transformers would offer it. A limit that tokenizer.json sets is kept: so it is in training."""

    is_fast = True
    padding_side = "right"
    pad_token_id = 0  # any would do: what it stands for counts nothing
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        limits = self.backend_tokenizer.truncation or {"max_length": UNLIMITED, "direction": "right"}
        self.model_max_length: int = limits["max_length"]
        self.truncation_side: str = limits["direction"]
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.post_processor = None  # no special tokens

    def __call__(self, texts: str | Sequence[str], **_: Any) -> dict[str, Any]:
        """Ids and mask: [batch, length], padded, or for one text [length]."""
        several = [texts] if isinstance(texts, str) else texts
        side, limit = self.truncation_side, self.model_max_length
        encoded = [encoding.ids for encoding in self.backend_tokenizer.encode_batch(several)]
        cut = [ids[:limit] if side == "right" else ids[-limit:] for ids in encoded]
        if isinstance(texts, str):
            return {"input_ids": cut[0], "attention_mask": [1] * len(cut[0])}
        lengths = np.array([len(ids) for ids in cut])
        mask = np.arange(max(1, lengths.max(initial=0))) < lengths[:, None]  # [batch, length]
        padded = np.full(mask.shape, self.pad_token_id)
        padded[mask] = [token for ids in cut for token in ids]
        return {"input_ids": torch.from_numpy(padded), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
