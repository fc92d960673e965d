"""Types of reranking with `documents` (Cohere, Jina, vLLM, Voyage), NIM's ranking, vLLM's score."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from sbert_infer.serve.settings import MAX_INPUTS
from sbert_infer.serve.wire.cohere import CohereMeta
from sbert_infer.serve.wire.openai import Cutting, Usage
from sbert_infer.serve.wire.schemas import Limit, ModelName, Text, Texts, Truncate

Most = Annotated[float, Meta(ge=0, multiple_of=1, description="How many of the best to return; 0: all.")]


class Document(Struct):
    """A document as an object."""

    text: str


Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]


class DocumentsRequest(Cutting, kw_only=True):
    """A request to sort documents by a query. `top_k` and `truncation` are Voyage's."""

    query: Text
    documents: Documents
    model: ModelName | None = None
    top_n: Most | None = None
    top_k: Most | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Limit | None = None  # Cohere
    max_chunks_per_doc: float | None = None  # Cohere; a document is one chunk here
    user: str | None = None


class Relevance(Struct, omit_defaults=True):
    """A document's index, its score from 0 to 1, and itself if `return_documents` is set."""

    index: int
    relevance_score: float
    document: Document | str | None = None


class RankedDocuments(Struct):
    """The best document first, as Cohere, Jina and vLLM respond."""

    id: str
    model: str
    results: list[Relevance]
    usage: Usage
    meta: CohereMeta


class VoyageRanking(Struct):
    """The best document first, as Voyage responds."""

    data: list[Relevance]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class RankingRequest(Struct, forbid_unknown_fields=True):
    """NIM's request to sort passages by a query."""

    query: Document
    passages: Annotated[list[Document], Meta(min_length=1, max_length=MAX_INPUTS // 2)]
    model: ModelName | None = None
    truncate: Truncate | None = None


class Logit(Struct):
    """A passage's index, and its score before any activation."""

    index: int
    logit: float


class Rankings(Struct):
    """The best passage first."""

    rankings: list[Logit]
    usage: Usage


class Scoring(Cutting, kw_only=True):
    """What vLLM's two requests for scores have in common."""

    model: ModelName | None = None
    user: str | None = None


class ScoreRequest(Scoring, kw_only=True):
    """A request to score one text with each of others, or texts in pairs."""

    text_1: str | Texts
    text_2: str | Texts


class QueriesRequest(Scoring, kw_only=True):
    """The same under vLLM's newer names."""

    queries: str | Texts
    documents: str | Texts


class Score(Struct):
    """The score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(Struct):
    """The scores, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
    object: Literal["list"] = "list"
