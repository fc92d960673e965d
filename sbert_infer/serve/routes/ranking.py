"""Reranking with `documents` (Cohere, Jina, vLLM, Voyage), NIM's /v1/ranking, and vLLM's /score."""

from __future__ import annotations

import time

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from sbert_infer.artifact.manifest import RERANKER
from sbert_infer.serve.http.body import decode
from sbert_infer.serve.http.caller import may_wait
from sbert_infer.serve.http.operation import COHERE, OPENAI, TEI, Operation, model_operation
from sbert_infer.serve.http.request_log import record_of
from sbert_infer.serve.models.registry import Models
from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.routes.handle import (
    DenseOptions,
    Truncation,
    any_truncation,
    encode,
    one_of,
    truncation,
    truncation_headers,
    whole,
)
from sbert_infer.serve.routes.rerank import Reranking, ranked
from sbert_infer.serve.settings import Settings
from sbert_infer.serve.wire.cohere import ApiVersion, Billed, CohereMeta
from sbert_infer.serve.wire.openai import Usage
from sbert_infer.serve.wire.problems import Problem
from sbert_infer.serve.wire.ranking import (
    Document,
    DocumentsRequest,
    Logit,
    QueriesRequest,
    RankedDocuments,
    RankingRequest,
    Rankings,
    Relevance,
    Score,
    ScoreRequest,
    Scores,
    VoyageRanking,
)
from sbert_infer.serve.wire.responses import as_numbers, json_response
from sbert_infer.serve.wire.schemas import Rank, RerankRequest, Shape
from sbert_infer.types import Encoded, Pair

_QUERY, _DOCUMENTS = "Who sat on the mat?", ["A cat sat on the mat.", "Rain falls."]
_NOTE = "For rerankers with one label: the best document first, with scores from 0 to 1."


class Ranking:
    """The handlers of these routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings
        self._reranking = Reranking(models, settings)

    def operations(self) -> list[Operation]:
        """The operations on these routes."""
        example = {"query": _QUERY, "documents": _DOCUMENTS, "top_n": 1}
        return [
            model_operation(
                "/rerank",
                "Sort texts or documents by a query",
                self.rerank,
                (list[Rank], RankedDocuments, VoyageRanking),
                (RerankRequest, DocumentsRequest),
                tag=TEI,
                example={"query": _QUERY, "texts": _DOCUMENTS},
                note=f"{_NOTE} With `texts` as TEI has it, with `documents` as Cohere, Jina and vLLM do.",
                needs=RERANKER,
            ),
            *(
                model_operation(
                    path,
                    "Sort documents by a query",
                    self.documents,
                    (RankedDocuments, VoyageRanking),
                    (DocumentsRequest,),
                    tag=tag,
                    example=example,
                    note=_NOTE,
                    needs=RERANKER,
                )
                for path, tag in (("/v1/rerank", OPENAI), ("/v2/rerank", COHERE))
            ),
            model_operation(
                "/v1/ranking",
                "Sort passages by a query, as NIM has it",
                self.ranking,
                Rankings,
                (RankingRequest,),
                tag=OPENAI,
                example={"query": {"text": _QUERY}, "passages": [{"text": text} for text in _DOCUMENTS]},
                needs=RERANKER,
            ),
            *(
                model_operation(
                    path,
                    "Score pairs of texts, as vLLM has it",
                    self.score,
                    Scores,
                    (ScoreRequest, QueriesRequest),
                    tag=OPENAI,
                    example={"text_1": _QUERY, "text_2": _DOCUMENTS},
                    note="One text with each of the others, or as many with as many. A reranker's scores are from "
                    "0 to 1, a sentence encoder's are cosines.",
                )
                for path in ("/score", "/v1/score")
            ),
        ]

    async def rerank(self, request: Request, body: bytes) -> Response:
        """Sort in TEI's form, or in that of the others if the body has `documents`."""
        if bytes(decode(body, Shape).documents):
            return await self.documents(request, body)
        return await self._reranking.rerank(request, body)

    async def documents(self, request: Request, body: bytes) -> Response:
        """Sort documents by their score with a query. Cohere and Jina cut long ones by default."""
        asked = decode(body, DocumentsRequest)
        may_wait(request, asked.priority)
        texts = [item if isinstance(item, str) else item.text for item in asked.documents]
        pairs: list[Pair] = [(asked.query, text) for text in texts]
        model = self._models.find(asked.model, RERANKER)
        limit = asked.max_tokens_per_doc
        cut = any_truncation(asked, model, self._settings, cut=True, max_tokens_per_doc=limit)
        scored = await self._reranking.scores(request, model, pairs, cut)
        most = whole(one_of(top_n=asked.top_n, top_k=asked.top_k)) or len(texts)
        best, usage = ranked(scored)[:most], Usage(scored.tokens, scored.tokens)
        content: VoyageRanking | RankedDocuments
        if asked.top_k is not None or asked.truncation is not None:  # only Voyage has these
            returned = [text if asked.return_documents else None for text in texts]
            content = VoyageRanking([Relevance(i, score, returned[i]) for i, score in best], model.name, usage)
        else:
            documents = [Document(text) if asked.return_documents else None for text in texts]
            results = [Relevance(i, score, documents[i]) for i, score in best]
            meta = CohereMeta(ApiVersion("2"), Billed(search_units=1))
            content = RankedDocuments(record_of(request).id, model.name, results, usage, meta)
        return json_response(content, truncation_headers(scored))

    async def ranking(self, request: Request, body: bytes) -> Response:
        """Sort passages by their score with a query, in NIM's form."""
        asked = decode(body, RankingRequest)
        pairs: list[Pair] = [(asked.query.text, passage.text) for passage in asked.passages]
        cut = truncation(self._settings, asked.truncate, cut=False)
        model = self._models.find(asked.model, RERANKER)
        scored = await self._reranking.scores(request, model, pairs, cut, raw=True)
        logits = [Logit(index, logit) for index, logit in ranked(scored)]
        return json_response(Rankings(logits, Usage(scored.tokens, scored.tokens)), truncation_headers(scored))

    async def score(self, request: Request, body: bytes) -> Response:
        """Score pairs of texts. vLLM refuses long ones by default."""
        asked: QueriesRequest | ScoreRequest
        if bytes(decode(body, Shape).queries):
            asked = decode(body, QueriesRequest)
            pairs = _paired(asked.queries, asked.documents)
        else:
            asked = decode(body, ScoreRequest)
            pairs = _paired(asked.text_1, asked.text_2)
        may_wait(request, asked.priority)
        model = self._models.find(asked.model, RERANKER)
        cut = any_truncation(asked, model, self._settings, cut=False)
        if model.manifest.kind == RERANKER:
            scored = await self._reranking.scores(request, model, pairs, cut)
        else:
            scored = await _cosines(request, model, pairs, cut)
        data = [Score(index, number) for index, (number,) in enumerate(as_numbers(scored.vectors))]
        usage = Usage(scored.tokens, scored.tokens)
        content = Scores(record_of(request).id, int(time.time()), model.name, data, usage)
        return json_response(content, truncation_headers(scored))


async def _cosines(request: Request, model: Model, pairs: list[Pair], cut: Truncation) -> Encoded:
    """The cosine of each pair, [pairs, 1]; a text that occurs in several runs once."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    options = DenseOptions(normalize_embeddings=True, truncate_dim=None, **cut)
    encoded = await encode(request, model, list(rows), None, options)
    vectors = encoded.vectors
    first, second = ([rows[pair[side]] for pair in pairs] for side in (0, 1))
    return encoded._replace(vectors=np.sum(vectors[first] * vectors[second], axis=1, keepdims=True))


def _paired(first: str | list[str], second: str | list[str]) -> list[Pair]:
    ones, others = ([texts] if isinstance(texts, str) else texts for texts in (first, second))
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        counts = f"{len(ones)} and {len(others)}"
        raise Problem("invalid_request", f"{counts} texts make no pairs: send one, or as many, as the first")
    return list(zip(ones, others, strict=True))
