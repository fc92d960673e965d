"""Rerankers as text-embeddings-inference has them: its /rerank and /predict."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.artifact.manifest import RERANKER
from sbert_infer.reranker import activate, softmax
from sbert_infer.serve.http.body import decode
from sbert_infer.serve.http.caller import caller_of
from sbert_infer.serve.http.operation import Operation, model_operation
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.routes.handle import Truncation, check_sizes, run_model, tei_truncation, truncation_headers
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.responses import as_numbers, json_response
from sbert_infer.serve.wire.schemas import Prediction, PredictRequest, Rank, RerankRequest
from sbert_infer.types import Encoded, Pair

Scores = npt.NDArray[np.float32]


class Reranking:
    """The handlers of these routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        return [
            model_operation(
                "/predict",
                "Score pairs of texts",
                self.predict,
                list[Prediction | list[Prediction]],
                (PredictRequest,),
                example={"inputs": [["Who sat on the mat?", "A cat sat on the mat."]]},
                note="For rerankers. One pair, or a list of pairs; for each, the likeliest label first.",
                needs=RERANKER,
            ),
        ]

    async def rerank(self, request: Request, body: bytes) -> Response:
        """Sort texts by their score with a query."""
        asked = decode(body, RerankRequest)
        pairs = [(asked.query, text) for text in asked.texts]
        model, cut = self._models.find(asked.model, RERANKER), tei_truncation(asked, self._settings)
        scored = await self.scores(request, model, pairs, cut, raw=asked.raw_scores)
        texts = asked.texts if asked.return_text else [None] * len(asked.texts)
        return json_response([Rank(i, score, texts[i]) for i, score in ranked(scored)], truncation_headers(scored))

    async def scores(
        self, request: Request, model: Model, pairs: list[Pair], cut: Truncation, *, raw: bool = False
    ) -> Encoded:
        """The scores of pairs, [pairs, 1], from 0 to 1 unless `raw`."""
        if (labels := len(model.manifest.labels)) > 1:
            raise Problem("not_supported", f"model {model.name} has {labels} labels: use /predict")
        scored = await self._score(request, model, pairs, cut)
        return scored._replace(vectors=_activated(scored.vectors, raw))

    async def predict(self, request: Request, body: bytes) -> Response:
        """Score pairs."""
        asked = decode(body, PredictRequest)
        model = self._models.find(asked.model, RERANKER)
        pairs, single = _pairs(asked.inputs)
        scored = await self._score(request, model, pairs, tei_truncation(asked, self._settings))
        rows = as_numbers(_activated(scored.vectors, asked.raw_scores))
        labels = [sorted(map(Prediction, row, model.manifest.labels), key=lambda item: -item.score) for row in rows]
        return json_response(labels[0] if single else labels, truncation_headers(scored))

    async def _score(self, request: Request, model: Model, pairs: list[Pair], cut: Truncation) -> Encoded:
        """The scores before the activation, [pairs, labels]."""
        model.require(RERANKER)
        check_sizes([max(pair, key=len) for pair in pairs])
        work = model.engine.predict_counted(pairs, **cut, **caller_of(request))
        return await run_model(request, model, len(pairs), work)


def ranked(scored: Encoded) -> list[tuple[int, float]]:
    """The index and score of each pair, the best first."""
    order = np.argsort(-scored.vectors[:, 0], kind="stable").tolist()
    numbers = as_numbers(scored.vectors[:, :1])
    return [(index, numbers[index][0]) for index in order]


def _activated(scores: Scores, raw: bool) -> Scores:
    """Apply sigmoid, or softmax if there are several labels, as TEI does for every model."""
    if raw:
        return scores
    return softmax(scores) if scores.shape[1] > 1 else activate(scores, "sigmoid")


def _pairs(inputs: Sequence[str | Pair]) -> tuple[list[Pair], bool]:
    """The pairs, and whether the request was for a single one."""
    pairs = [item for item in inputs if not isinstance(item, str)]
    if len(pairs) == len(inputs):
        return pairs, False
    if pairs or len(inputs) != 2:
        raise Problem("invalid_request", "send one pair of texts, or a list of pairs", param="inputs")
    return [(str(inputs[0]), str(inputs[1]))], True
