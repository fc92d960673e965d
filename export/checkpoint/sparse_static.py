"""SparseStaticEmbedding: no transformer, a weight for each word. The vector of a text has those of its words.

Its tokens are those of the text alone, without special ones, and of an empty text there are none:
its vector is zero.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from sbert_infer.export.checkpoint.modules import Problems, read_json, read_weights, unknown_keys
from sbert_infer.export.checkpoint.sparse_modules import PresenceSpec
from sbert_infer.export.checkpoint.static import UNLIMITED

__all__ = ["SPARSE_STATIC", "WordEncoder", "read_sparse_static", "without_special_tokens"]

SPARSE_STATIC = "sparse-static"


def read_sparse_static(folder: Path, name: str, tokenizer: Any, problems: Problems) -> tuple[PresenceSpec, int]:
    """Check the table saved in `folder` with its `tokenizer`; the module and the length limit."""
    config = read_json(folder / "config.json", f"{name}/config.json", problems)
    unknown_keys(config, ("frozen",), f"{name}/config.json", problems)
    words = 1
    try:
        weights = read_weights(folder)
        if list(weights) != ["weight"] or weights["weight"].ndim != 1:
            raise ValueError("the weights must hold one list 'weight' and nothing else")
        words = len(weights["weight"])
    except ValueError as error:
        problems.append(f"{name}: {error}")
    if tokenizer is None:
        return PresenceSpec(words, ("presence",), path=folder), UNLIMITED
    if (largest := max(tokenizer.get_vocab().values(), default=-1)) >= words:
        problems.append(f"{name}: the tokenizer has the token {largest}, but there are weights for {words} only")
    return PresenceSpec(words, ("presence",), path=folder), min(tokenizer.model_max_length, UNLIMITED)


def without_special_tokens(tokenizer: Any) -> Any:
    """`tokenizer`, which now adds none to a text."""
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer


class WordEncoder(nn.Module):
    """In the shape of a transformer without layers: each token is its own id."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=0, _attn_implementation=None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        """[batch, length] -> [batch, length, 1]."""
        return SimpleNamespace(last_hidden_state=input_ids.unsqueeze(-1))
