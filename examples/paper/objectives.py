"""The paper's three objectives, each a loss and its data, and the training they share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, SoftmaxLoss, TripletLoss
from transformers import PrinterCallback, ProgressCallback

from examples.paper.data import Data

__all__ = ["OBJECTIVES", "Objective", "train"]

LABELS = 3
MOST_SIMILAR = 5
MARGIN = 1.0  # with a Euclidean distance, both as in the paper
BATCH_SIZE, WARMUP_SHARE = 16, 0.1  # as in the paper
SEED = 0


@dataclass(frozen=True)
class Objective:
    """A loss, its dataset and its learning rate."""

    name: str
    title: str
    loss: Callable[[SentenceTransformer], Any]
    dataset: Callable[[Data], Dataset]
    learning_rate: float


def _softmax_loss(model: SentenceTransformer) -> Any:
    """Cross-entropy of softmax(W (u, v, |u - v|))."""
    return SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=LABELS)


def _triplet_loss(model: SentenceTransformer) -> Any:
    """max(|a - p| - |a - n| + margin, 0)."""
    return TripletLoss(model, triplet_margin=MARGIN)


def _labelled(data: Data) -> Dataset:
    left, right, labels = zip(*data.labelled, strict=True)
    return Dataset.from_dict({"left": left, "right": right, "label": [int(label) for label in labels]})


def _scored(data: Data) -> Dataset:
    left, right, scores = zip(*data.scored, strict=True)
    return Dataset.from_dict({"left": left, "right": right, "label": [score / MOST_SIMILAR for score in scores]})


def _triplets(data: Data) -> Dataset:
    return Dataset.from_dict(
        dict(zip(("anchor", "positive", "negative"), zip(*data.triplets, strict=True), strict=True))
    )


# The paper trains BERT-base on a million pairs at 2e-5; few steps on few layers need more.
OBJECTIVES = (
    Objective("softmax", "softmax over (u, v, |u-v|)", _softmax_loss, _labelled, 1e-4),
    Objective("cosine", "cosine regression", CosineSimilarityLoss, _scored, 3e-4),
    Objective("triplet", "triplet", _triplet_loss, _triplets, 3e-4),
)


def train(model: SentenceTransformer, objective: Objective, data: Data) -> list[float]:
    """Train for one epoch with the trainer of sentence-transformers; return each step's loss."""
    model.model_card_data.widget = [{"text": ""}]  # else examples are searched for a model card
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=objective.learning_rate,
            warmup_steps=WARMUP_SHARE,
            seed=SEED,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        dataset, loss = objective.dataset(data), objective.loss(model)
        trainer = SentenceTransformerTrainer(model=model, args=settings, train_dataset=dataset, loss=loss)
        for verbose in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(verbose)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
