"""A cross-encoder as eager PyTorch in FP32: what every artifact of it is compared with."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from sbert_infer.errors import CheckpointError
from sbert_infer.export.checkpoint.hub import first_line
from sbert_infer.export.checkpoint.transformer import load_tokenizer, quiet_transformers
from sbert_infer.export.families.cross_encoder.checkpoint import CrossEncoderCheckpoint
from sbert_infer.export.reference.encoder import Encoder, weight_problems
from sbert_infer.types import Pair

__all__ = ["PairReference", "load_pair_reference"]

Scores = npt.NDArray[np.float32]

_NOTHING = re.compile(r"(?!)")  # matches no weight: every one of them is used


class PairReference(Encoder):
    """The model for sequence classification; its scores are those before the activation."""

    def __init__(self, cross_encoder: CrossEncoderCheckpoint, encoder: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.cross_encoder = cross_encoder
        self.checkpoint = cross_encoder.checkpoint
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.eval()

    @property
    def token_types(self) -> bool:
        """Whether the model tells the second text of a pair from the first by token types."""
        config: Any = self.encoder.config
        return getattr(config, "type_vocab_size", 0) > 1 and any(self.tokenizer("a", "b").get("token_type_ids", ()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """[batch, length], two or three times -> [batch, labels]."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        scores: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return scores

    def tokenize(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """The inputs of `forward`, padded; of a pair over the limit, tokens of the longer text are left out."""
        first, second = ([pair[side] for pair in pairs] for side in (0, 1))
        batch = self.tokenizer(first, second, padding=True, truncation="longest_first", return_tensors="pt")
        names = ("input_ids", "attention_mask", *(["token_type_ids"] if self.token_types else []))
        return {name: batch[name] for name in names}

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair], *, batch_size: int = 16) -> Scores:
        """[pairs, labels]."""
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))  # similar lengths, less padding
        scores = np.empty((len(pairs), len(self.cross_encoder.labels)), np.float32)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            scores[rows] = self(**self.tokenize([pairs[i] for i in rows])).numpy()
        return scores


def load_pair_reference(cross_encoder: CrossEncoderCheckpoint) -> PairReference:
    """Load the weights in FP32. Raises `CheckpointError` for weights that are missing, misshapen or unknown."""
    checkpoint = cross_encoder.checkpoint
    try:
        with quiet_transformers():
            encoder, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                checkpoint.transformer_path,
                dtype=torch.float32,
                trust_remote_code=checkpoint.trust_remote_code,
                weights_only=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they come back in `info`, all of them
                output_loading_info=True,
            )
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, ValueError) as error:
        problem = f"the weights can't be loaded: {first_line(error)}"
        raise CheckpointError(checkpoint.source, [problem]) from error
    if problems := list(weight_problems(info, unused=_NOTHING)):
        raise CheckpointError(checkpoint.source, problems)
    encoder.config.use_cache = False
    return PairReference(cross_encoder, encoder, load_tokenizer(checkpoint))
