"""haystack-ai: OpenAITextEmbedder and OpenAIDocumentEmbedder, sync and async."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import json
import sys

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.utils import Secret

given = json.load(sys.stdin)
texts = given["texts"]
server = {"api_base_url": given["url"] + "/v1", "api_key": Secret.from_token(given["key"]), "model": given["model"]}
documents = [Document(id=str(index), content=text) for index, text in enumerate(texts)]
embedder = OpenAIDocumentEmbedder(**server, progress_bar=False)


def vectors(answer: dict[str, list[Document]]) -> list[list[float]]:
    assert [document.content for document in answer["documents"]] == texts
    return [document.embedding for document in answer["documents"]]


found = {
    "documents": vectors(embedder.run(documents)),
    "queries": [OpenAITextEmbedder(**server).run(text)["embedding"] for text in texts[:3]],
    "async": vectors(asyncio.run(embedder.run_async(documents))),
}
print(json.dumps({"vectors": found}))
