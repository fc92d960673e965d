"""What type checkers know of `encode`: the type of its result by the arguments that choose it.

The kind of a model is not part of its type, so these are the results of a dense encoder. Those of a
sparse or multi-vector encoder are to be annotated: `vectors: Any = engine.encode(texts)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, cast, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

# The arguments of `encode` after the prompt, in the order of `SentenceTransformer`.
AFTER_PROMPT = (
    *("batch_size", "show_progress_bar", "output_value", "precision", "convert_to_numpy", "convert_to_tensor"),
    *("device", "normalize_embeddings", "truncate_dim", "pool", "chunk_size"),
)
# Those of `encode_multi_process` after the pool, in its order.
AFTER_POOL = (
    *("prompt_name", "prompt", "batch_size", "chunk_size", "show_progress_bar"),
    *("precision", "normalize_embeddings", "truncate_dim"),
)
Texts = str | Iterable[str] | None
Sentences = Literal["sentence_embedding"]


class EncodeArguments(TypedDict, total=False):
    """The arguments of `encode` that do not change the type of its result."""

    device: Any
    normalize_embeddings: bool
    truncate_dim: int | None
    pool: dict[str, Any] | None
    chunk_size: int | None
    sentences: Texts
    out: npt.NDArray[np.float32] | None
    max_active_dims: int | None
    convert_to_sparse_tensor: bool | None
    save_to_cpu: bool | None
    token_pooling: Any
    task: str | None
    task_metadata: Any
    prompt_type: Any
    hf_split: str | None
    hf_subset: str | None


class Encode(Protocol):
    """`encode`, `encode_query` and `encode_document`."""

    @overload
    def __call__(
        self,
        inputs: Texts = ...,
        prompt_name: str | None = ...,
        prompt: str | None = ...,
        batch_size: int | None = ...,
        show_progress_bar: bool | None = ...,
        output_value: Sentences = ...,
        precision: Literal["float32"] | None = ...,
        convert_to_numpy: Literal[True] | None = ...,
        convert_to_tensor: Literal[False] | None = ...,
        **arguments: Unpack[EncodeArguments],
    ) -> npt.NDArray[np.float32]: ...

    @overload
    def __call__(
        self,
        inputs: Texts = ...,
        prompt_name: str | None = ...,
        prompt: str | None = ...,
        batch_size: int | None = ...,
        show_progress_bar: bool | None = ...,
        output_value: Sentences = ...,
        precision: str | None = ...,
        convert_to_numpy: bool | None = ...,
        *,
        convert_to_tensor: Literal[True],
        **arguments: Unpack[EncodeArguments],
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self,
        inputs: Texts = ...,
        prompt_name: str | None = ...,
        prompt: str | None = ...,
        batch_size: int | None = ...,
        show_progress_bar: bool | None = ...,
        output_value: str | None = ...,
        precision: str | None = ...,
        convert_to_numpy: bool | None = ...,
        convert_to_tensor: bool | None = ...,
        **arguments: Unpack[EncodeArguments],
    ) -> Any: ...


def typed_as_encode(function: Callable[..., Any]) -> Encode:
    """Return `function` itself; type checkers see it as `Encode`."""
    return cast("Encode", function)
