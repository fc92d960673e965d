"""A cross-encoder as eager PyTorch in FP32, which its artifacts are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sbert_infer.export.checkpoint.transformer import load_tokenizer
from sbert_infer.export.families.cross_encoder.checkpoint import CrossEncoderCheckpoint
from sbert_infer.export.options import Progress, no_progress
from sbert_infer.export.reference.encoder import Encoder, batches_by_length, load_encoder
from sbert_infer.types import Pair

Scores = npt.NDArray[np.float32]


class PairReference(Encoder):
    """The model for sequence classification. Its scores are those before the activation."""

    @property
    def token_types(self) -> bool:
        """Whether token types tell the second text of a pair from the first."""
        config: Any = self.encoder.config
        return getattr(config, "type_vocab_size", 0) > 1 and any(self.tokenizer("a", "b").get("token_type_ids", ()))

    @property
    def gelu_layers(self) -> int:
        """Number of layers whose activation is a GELU; the head of some is one more."""
        encoder: Any = self.encoder
        heads = [getattr(encoder.config, key, "") for key in ("pooler_hidden_act", "classifier_activation")]
        # Of ELECTRA's head, config.json says nothing.
        parts = (encoder, getattr(encoder, "classifier", None))
        heads += [type(getattr(part, "activation", None)).__name__ for part in parts]
        return super().gelu_layers + any("gelu" in str(name).lower() for name in heads)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """[batch, length], two or three times -> [batch, labels]."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        scores: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **types).logits
        return scores

    def tokenize(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """The padded inputs of `forward`; pairs over the limit lose tokens of the longer text."""
        first, second = ([pair[side] for pair in pairs] for side in (0, 1))
        batch = self.tokenizer(first, second, padding=True, truncation="longest_first", return_tensors="pt")
        names = ("input_ids", "attention_mask", *(["token_type_ids"] if self.token_types else []))
        return {name: batch[name] for name in names}

    @torch.inference_mode()
    def score(self, pairs: Sequence[Pair], *, batch_size: int = 16, progress: Progress = no_progress) -> Scores:
        """[pairs, labels]. `progress` takes the number of tokens that are done."""
        scores = np.empty((len(pairs), self.checkpoint.dim), np.float32)
        for rows in batches_by_length([sum(map(len, pair)) for pair in pairs], batch_size):
            inputs = self.tokenize([pairs[i] for i in rows])
            scores[rows] = self(**inputs).numpy()
            progress(int(inputs["attention_mask"].sum()))
        return scores


def load_pair_reference(checkpoint: CrossEncoderCheckpoint) -> PairReference:
    """Load the weights in FP32; raises `CheckpointError` if they do not fit the model."""
    encoder = load_encoder(checkpoint, "AutoModelForSequenceClassification")
    return PairReference(checkpoint, encoder, load_tokenizer(checkpoint))
