"""Models without a transformer: a table with a vector (StaticEmbedding) or a weight for each token.

StaticEmbedding (model2vec, potion) gives the mean of the vectors of a text's tokens;
SparseStaticEmbedding gives the weights of the tokens that a text contains. Both tokenize without
special tokens, so an empty text has no tokens and its vector is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from sbert_infer.export.checkpoint.hub import first_line
from sbert_infer.export.checkpoint.modules import Problems, read_json, read_weights, unknown_keys
from sbert_infer.export.checkpoint.sparse_modules import PresenceSpec

STATIC, SPARSE_STATIC = "static", "sparse-static"  # model types
UNLIMITED = 2**20  # tokens: sentence-transformers sets no limit, but an artifact has to


def read_static(folder: Path, name: str, problems: Problems) -> tuple[int, int]:
    """Check the table and the tokenizer in `folder`; return vector width and length limit."""
    before = len(problems)
    try:
        table = read_table(folder)
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


def read_table(folder: Path) -> Tensor:
    """The vectors in `folder` as one FP32 row for each token; raises ValueError.

    model2vec may store fewer rows, with a `mapping` from tokens to rows, and a factor for each
    token, its `weights`.
    """
    weights = read_weights(folder)
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


class StaticTokenizer:
    """StaticEmbedding's tokenizer, with the interface of transformers.

    A limit set in tokenizer.json is kept, since training used it too.
    """

    is_fast = True
    padding_side = "right"
    pad_token_id = 0  # any id would do: padding counts for nothing
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
        """Ids and mask, each [batch, length] and padded, or [length] for a single text."""
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


def read_sparse_static(folder: Path, name: str, tokenizer: Any, problems: Problems) -> tuple[PresenceSpec, int]:
    """Check the table in `folder` against `tokenizer`; return module and length limit."""
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
    """Let `tokenizer` add no special tokens to a text, and return it."""
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer
