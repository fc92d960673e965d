"""OpenAI's types, with the fields that NIM, Jina, Voyage and vLLM have added to its requests."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from sbert_infer.serve.settings import MAX_INPUTS
from sbert_infer.serve.wire.schemas import (
    Dimensions,
    InputType,
    Limit,
    ModelName,
    PromptName,
    TokenIds,
    Truncate,
    Urgency,
    VectorType,
)


class Cutting(Struct, forbid_unknown_fields=True, kw_only=True):
    """What to do with texts over the model's limit in the words of four contracts, and how soon."""

    truncate: Truncate | None = None  # NIM, Jina
    truncation: bool | None = None  # Voyage
    truncate_prompt_tokens: Limit | None = None  # vLLM
    truncation_side: Literal["left", "right"] | None = None  # vLLM
    priority: Urgency | None = None  # vLLM, Cohere


class TextObject(Struct, forbid_unknown_fields=True):
    """A text as an object, as Jina also has it."""

    text: str


TextsOrObjects = Annotated[list[str | TextObject], Meta(min_length=1, max_length=MAX_INPUTS)]


class EmbeddingRequest(Cutting):
    """OpenAI's request for embeddings, and what others add. `prompt_name` is ours."""

    input: str | TextsOrObjects
    model: ModelName | None = None
    encoding_format: VectorType | Literal["base64"] | None = None
    dimensions: Dimensions | None = None
    user: str | None = None
    prompt_name: PromptName | None = None
    input_type: InputType | None = None  # NIM, Voyage, litellm
    task: InputType | None = None  # Jina
    embedding_type: VectorType | Literal["base64"] | None = None  # Jina, NIM
    output_dtype: VectorType | None = None  # Voyage
    output_dimension: Dimensions | None = None  # Voyage
    normalized: bool | None = None  # Jina
    late_chunking: bool | None = None  # Jina; true is refused
    modality: Literal["text"] | None = None  # Infinity


class TokenEmbeddingRequest(EmbeddingRequest, kw_only=True):
    """The same with token ids. Only with `--allow-token-ids`."""

    input: TokenIds  # type: ignore[assignment]


class LenientEmbeddingRequest(EmbeddingRequest, forbid_unknown_fields=False, kw_only=True):
    """OpenAI's request as text-embeddings-inference takes it: unknown fields are ignored."""


class LenientTokenEmbeddingRequest(TokenEmbeddingRequest, forbid_unknown_fields=False, kw_only=True):
    """The same with token ids. Only with `--allow-token-ids`."""


class Embedding(Struct):
    """One vector: numbers, or base64 of them, by default little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Usage(Struct):
    """Tokens, special ones included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """OpenAI's response, in the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


class OpenAIModel(Struct):
    """A model, by one of its names."""

    id: str
    created: int
    fingerprint: str  # of everything that its vectors depend on
    object: Literal["model"] = "model"
    owned_by: str = "sbert-infer"


class ModelList(Struct):
    """The served models."""

    data: list[OpenAIModel]
    object: Literal["list"] = "list"


class OpenAIError(Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(Struct):
    """An error in OpenAI's form; `detail` is the message again, for clients of Voyage and Jina."""

    error: OpenAIError
    detail: str
