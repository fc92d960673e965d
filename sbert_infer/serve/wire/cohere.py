"""Cohere's types for embeddings, /v1/embed and /v2/embed, and its form of an error."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from sbert_infer.serve.wire.schemas import Dimensions, InputType, Limit, ModelName, Texts, Truncate, Urgency, VectorType

Types = Annotated[list[VectorType | Literal["base64"]], Meta(min_length=1, max_length=6)]


class CohereEmbedRequest(Struct, forbid_unknown_fields=True):
    """Cohere's request for embeddings of texts."""

    texts: Texts
    model: ModelName | None = None
    input_type: InputType | None = None
    embedding_types: Types | None = None
    output_dimension: Dimensions | None = None
    truncate: Truncate | None = None
    max_tokens: Limit | None = None
    priority: Urgency | None = None


class ByType(Struct, omit_defaults=True):
    """The vectors of all texts in each type that was asked for."""

    float_: list[list[float]] | None = field(default=None, name="float")
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class ApiVersion(Struct):
    """Which of Cohere's versions a response follows."""

    version: str


class Billed(Struct, omit_defaults=True):
    """What Cohere would count."""

    input_tokens: int | None = None
    search_units: int | None = None


class CohereMeta(Struct):
    """About a response."""

    api_version: ApiVersion
    billed_units: Billed


class CohereEmbeddings(Struct):
    """Cohere's response with vectors by type; version 1 without `embedding_types` has a list."""

    id: str
    embeddings: ByType | list[list[float]]
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type", "embeddings_floats"] = "embeddings_by_type"


class CohereError(Struct):
    """An error in Cohere's form."""

    message: str
