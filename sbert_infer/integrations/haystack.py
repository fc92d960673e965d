"""Components for Haystack: `SbertTextEmbedder("model.onnx")`, `SbertDocumentEmbedder(...)`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sbert_infer.engine import Engine
from sbert_infer.integrations.opening import Model, missing, open_engine, written_down

try:
    from haystack import Document, component, default_from_dict, default_to_dict
except ImportError as error:
    raise missing(error, "haystack-ai") from error


Component = TypeVar("Component", bound="_Embedder")


class _Embedder:
    """What both components have: an engine, opened when it is first needed."""

    model: Model
    options: dict[str, Any]

    @property
    def engine(self) -> Engine:
        """The engine, opened when it is first needed."""
        return open_engine(self.model, self.options)

    def warm_up(self) -> None:
        """Open the engine."""
        _ = self.engine

    @classmethod
    def from_dict(cls: type[Component], data: dict[str, Any]) -> Component:
        """Make the component of what `to_dict` returned."""
        made: Component = default_from_dict(cls, data)
        return made


@component
class SbertTextEmbedder(_Embedder):
    """Embeds a query, with the model's prompt for queries.

    `model` is an `Engine`, or what one opens, with its keyword options.
    """

    def __init__(self, model: Model, **options: Any) -> None:
        self.model = model
        self.options = options

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """Embed `text`."""
        return {"embedding": self.engine.encode_query(text).tolist()}

    @component.output_types(embedding=list[float])
    async def run_async(self, text: str) -> dict[str, Any]:
        """Embed `text` in a thread."""
        return await asyncio.to_thread(self.run, text)

    def to_dict(self) -> dict[str, Any]:
        """Write the path and the options down."""
        return dict(default_to_dict(self, model=written_down(self.model), **self.options))


@component
class SbertDocumentEmbedder(_Embedder):
    """Embeds documents, with the model's prompt for documents.

    `model` is an `Engine`, or what one opens, with its keyword options. The fields of `meta` that
    `meta_fields_to_embed` names come first, joined with `embedding_separator`.
    """

    def __init__(
        self,
        model: Model,
        meta_fields_to_embed: Sequence[str] = (),
        embedding_separator: str = "\n",
        **options: Any,
    ) -> None:
        self.model = model
        self.meta_fields_to_embed = list(meta_fields_to_embed)
        self.embedding_separator = embedding_separator
        self.options = options

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return copies of the documents, with embeddings."""
        vectors = self.engine.encode_document([self._text(document) for document in documents]).tolist()
        return {"documents": [replace(each, embedding=vector) for each, vector in zip(documents, vectors, strict=True)]}

    @component.output_types(documents=list[Document])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        """Do the same in a thread."""
        return await asyncio.to_thread(self.run, documents)

    def _text(self, document: Document) -> str:
        fields = [document.meta.get(name) for name in self.meta_fields_to_embed]
        return self.embedding_separator.join([*(str(each) for each in fields if each), document.content or ""])

    def to_dict(self) -> dict[str, Any]:
        """Write the path and the options down."""
        own = {"meta_fields_to_embed": self.meta_fields_to_embed, "embedding_separator": self.embedding_separator}
        return dict(default_to_dict(self, model=written_down(self.model), **own, **self.options))
