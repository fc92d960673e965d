"""The types of requests and responses, which decode them and describe them in /openapi.json.

Here are the fields that several contracts share, text-embeddings-inference's types, and our own.
The other contracts have a module each. text-embeddings-inference ignores fields that it does not
know, and so do its types here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from sbert_infer.serve.settings import MAX_INPUTS

# A whole number, but JSON does not tell 64 from 64.0.
Dimensions = Annotated[float, Meta(ge=1, multiple_of=1)]
PromptName = Annotated[str, Meta(description="Which of the model's prompts to put before each text.")]
ModelName = Annotated[str, Meta(description="One of the names that `/v1/models` lists.")]
Direction = Literal["left", "right", "Left", "Right"]
Truncate = Annotated[
    bool | Literal["NONE", "START", "END"],
    Meta(description="Whether to cut texts over the model's limit, and where."),
]
InputType = Annotated[str, Meta(description="What the texts are: decides which of the model's prompts they get.")]
VectorType = Literal["float", "int8", "uint8", "binary", "ubinary"]
# Cohere's and vLLM's: lower numbers first.
Urgency = Annotated[float, Meta(multiple_of=1, description="Above 0, the request may wait: it is bulk.")]
# A limit in tokens. Texts are only ever cut at the model's own.
Limit = Annotated[float, Meta(ge=-1, multiple_of=1)]

# OpenAI takes an empty text, text-embeddings-inference does not.
Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
Text = Annotated[str, Meta(min_length=1)]
FilledTexts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]
TokenId = Annotated[int, Meta(ge=0)]
TokenIds = Annotated[
    list[TokenId | Annotated[list[TokenId], Meta(min_length=1)]],
    Meta(
        min_length=1, max_length=MAX_INPUTS, description="Ids of the model's own tokenizer: one list, or one per text."
    ),
]
_PAIR = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
Pairs = Annotated[
    list[str | tuple[str, str]],  # not lists: empty ones would be made by the million before they are counted
    Meta(
        min_length=1,
        max_length=MAX_INPUTS // 2,  # of two texts each
        description="Two texts, or a list of pairs of texts.",
        extra_json_schema={"anyOf": [_PAIR, {"type": "array", "items": _PAIR}]},
    ),
]


# text-embeddings-inference ------------------------------------------------------------------------


class Truncating(Struct, kw_only=True):
    """What to do with texts over the model's limit."""

    truncate: Truncate | None = None
    truncation_direction: Direction | None = None


class TextsRequest(Truncating):
    """What requests to embed texts have in common. `model` is ours."""

    inputs: Text | FilledTexts
    prompt_name: PromptName | None = None
    model: ModelName | None = None


class EmbedRequest(TextsRequest):
    """A request for embeddings. `model` is ours: the default is the first."""

    normalize: bool | None = True
    dimensions: Dimensions | None = None


class EmbedAllRequest(TextsRequest):
    """A request for an embedding of each token. `model` is ours: the default is the first."""


class EmbedSparseRequest(TextsRequest):
    """A request for sparse embeddings. `model` is ours: the default is the first sparse encoder."""


class TokenEmbedRequest(EmbedRequest, kw_only=True):
    """The same with token ids. Only with `--allow-token-ids`."""

    inputs: TokenIds  # type: ignore[assignment]


class SimilarityInputs(Struct):
    """The sentences to compare."""

    source_sentence: Text
    sentences: Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS - 1)]


class SimilarityOptions(Truncating):
    """As in `/embed`."""

    prompt_name: PromptName | None = None


class SimilarityRequest(Struct):
    """A request to compare one sentence with others."""

    inputs: SimilarityInputs
    parameters: SimilarityOptions | None = None
    model: ModelName | None = None


class Shape(Struct):
    """As much of a body as shows which kind of request it is, where a path takes several."""

    inputs: Raw = Raw(b"null")
    query: Raw = Raw(b"")
    documents: Raw = Raw(b"")
    queries: Raw = Raw(b"")


class RerankRequest(Truncating):
    """A request to sort texts. Scores are from 0 to 1, or the model's own with `raw_scores`."""

    query: Text
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False
    model: ModelName | None = None


class Rank(Struct, omit_defaults=True):
    """The index and score of a text, and the text itself if `return_text` is set."""

    index: int
    score: float
    text: str | None = None


class PredictRequest(Truncating):
    """A request to score pairs. Several scores of one pair sum to 1, unless `raw_scores` is set."""

    inputs: Pairs
    raw_scores: bool = False
    model: ModelName | None = None


class Prediction(Struct):
    """A label and its score."""

    score: float
    label: str


class TokenizeRequest(Struct):
    """A request for tokens. Nothing is truncated."""

    inputs: Text | FilledTexts
    add_special_tokens: bool = True
    prompt_name: PromptName | None = None
    model: ModelName | None = None


class DecodeRequest(Struct):
    """A request for the texts of token ids."""

    ids: TokenIds
    skip_special_tokens: bool = True
    model: ModelName | None = None


class SparseValue(Struct):
    """One dimension of a sparse embedding, and its value."""

    index: int
    value: float


class Token(Struct):
    """A token and the characters it stands for, which special tokens don't have."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TeiError(Struct):
    """An error in text-embeddings-inference's form, which Ollama's clients read as well."""

    error: str
    error_type: str


class ModelCard(Struct):
    """A served model, as it runs now."""

    name: str
    kind: str
    names: list[str]
    file: str
    ready: bool
    precision: str
    backend: str
    device: str
    architecture: str
    pooling: list[str]
    dim: int
    max_length: int
    normalized: bool
    similarity: str
    prompts: list[str]
    default_prompt_name: str | None
    max_batch_tokens: int
    workers: int
    weights_sha256: str
    fingerprint: str  # of everything that its vectors depend on
    model_fingerprint: str  # the same without the precision
    fingerprint_parts: dict[str, str]
    parity: dict[str, Any]
    versions: dict[str, str]


class Info(Struct):
    """The first model under text-embeddings-inference's names; `models` describes every model."""

    model_id: str
    model_sha: str
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str
    models: list[ModelCard]


# Ours ---------------------------------------------------------------------------------------------


class Health(Struct):
    """The state of the server."""

    status: Literal["live", "ready"]


class Reloaded(Struct):
    """A model that was reloaded."""

    name: str
    weights_sha256: str


class Reload(Struct):
    """The reloaded models."""

    models: list[Reloaded]


class Series(Struct):
    """A metric with its labels."""

    name: str
    labels: dict[str, str]


class PastValues(Struct):
    """The values of all series at one moment. Series that came later are left out at the end."""

    age_s: float
    values: list[float | None]  # None: there was no such series then


class PastMetrics(Struct):
    """What the live page plots, of the last quarter of an hour, the oldest first."""

    series: list[Series]
    samples: list[PastValues]
