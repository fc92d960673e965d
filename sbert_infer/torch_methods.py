"""The part of `Engine` that losses of sentence-transformers call, as they call a torch module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbert_infer.artifact.manifest import ENCODER, SENTENCE
from sbert_infer.base_engine import BaseEngine
from sbert_infer.encode.dense import DenseOutput
from sbert_infer.encode.results import import_torch
from sbert_infer.errors import EngineError


class TorchMethods(BaseEngine):
    """A dense encoder as losses use it when they evaluate: without gradients."""

    def smart_batching_collate(self, batch: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the features of each column of texts, and the labels, of some `InputExample`s."""
        torch = import_torch()
        columns = zip(*(example.texts for example in batch), strict=True)
        labels = [example.label for example in batch]
        as_tensor = torch.as_tensor(np.stack(labels)) if isinstance(labels[0], np.ndarray) else torch.tensor(labels)
        return [self.preprocess(column) for column in columns], as_tensor

    def forward(self, features: Any) -> dict[str, Any]:
        """Return `features`, which `preprocess` made, with the "sentence_embedding" of each text.

        This is for evaluation under `torch.no_grad()`. There is no prompt, and vectors are whole.
        """
        if not isinstance(features, Mapping) or "input_ids" not in features:
            what = type(features).__name__
            raise TypeError(f"forward needs the features that preprocess returns, got {what}: for texts, use encode")
        if self.manifest.kind != ENCODER:
            raise ValueError(f"forward: not for {self.manifest.name}, which is no dense encoder: use encode")
        torch = import_torch()
        if torch.is_grad_enabled():
            raise EngineError("an engine has no gradients and can't be trained: call it in torch.no_grad()")
        ids = torch.as_tensor(features["input_ids"])
        mask = torch.as_tensor(features.get("attention_mask", torch.ones_like(ids))).bool()
        rows = [row[own].tolist() for row, own in zip(ids, mask, strict=True)]
        pipeline, output = self.pipeline, DenseOutput(self.manifest)
        tokenized = pipeline.tokenizer.tokenized(rows)
        pipeline.refuse_truncation(tokenized, None, output)
        vectors = torch.from_numpy(pipeline.run_tokenized(tokenized, output).vectors)
        return {**features, SENTENCE: vectors.to(ids.device)}

    __call__ = forward
