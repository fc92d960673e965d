"""Train, export and test every objective with every pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

from examples.paper.data import Data
from examples.paper.models import POOLINGS, bi_encoder
from examples.paper.objectives import OBJECTIVES, train
from sbert_infer import Engine
from sbert_infer.export.exporter import export

__all__ = ["HEADER", "MODELS", "Quality", "measure_quality", "row"]

MAX_TOKENS = 64
EDGE_SHARE = 5  # the first and the last fifth of the steps are compared
MODELS = {f"{objective.name}-{pooling}": (objective, pooling) for objective in OBJECTIVES for pooling in POOLINGS}
HEADER = """\
| objective | pooling | loss, first to last fifth | Spearman untrained | trained | exported |
|---|---|---|--:|--:|--:|"""


@dataclass(frozen=True)
class Quality:
    """Losses in training; correlation with the true scores untrained, trained and exported."""

    objective: str
    pooling: str
    losses: list[float]  # of each step
    untrained: float
    trained: float
    exported: float


def measure_quality(
    base: str, layers: int, names: Sequence[str], data: Data, folder: Path, say: Callable[[str], object]
) -> Iterator[Quality]:
    """Train and export the models of these `names` into `folder`, and yield each result."""
    evaluate = _evaluator(data)
    for name in names:
        objective, pooling = MODELS[name]
        say(f"training {name}")
        model = bi_encoder(base, pooling, MAX_TOKENS, layers)
        untrained = evaluate(model)
        losses = train(model, objective, data)
        model.save(str(folder / name), create_model_card=False)
        say(f"exporting {name}")
        artifact = folder / f"{name}.onnx"
        export(folder / name, artifact)
        with Engine(artifact) as engine:
            yield Quality(objective.title, pooling, losses, untrained, evaluate(model), evaluate(engine))


def row(quality: Quality) -> str:
    """Render a row under `HEADER`."""
    edge = max(1, len(quality.losses) // EDGE_SHARE)
    first, last = fmean(quality.losses[:edge]), fmean(quality.losses[-edge:])
    cells = [quality.objective.replace("|", "\\|"), quality.pooling, f"{first:.3f} to {last:.3f}"]
    cells += [f"{value:.4f}" for value in (quality.untrained, quality.trained, quality.exported)]
    return f"| {' | '.join(cells)} |"


def _evaluator(data: Data) -> Callable[[Any], float]:
    """Make sentence-transformers' evaluator, which takes both its models and engines."""
    left, right, scores = (list(column) for column in zip(*data.test, strict=True))
    evaluator = EmbeddingSimilarityEvaluator(left, right, scores, main_similarity="cosine", write_csv=False)
    return lambda model: float(evaluator(model)["spearman_cosine"])
