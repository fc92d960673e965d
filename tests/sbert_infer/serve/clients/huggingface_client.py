"""huggingface_hub: feature_extraction and sentence_similarity, sync and async."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient

given = json.load(sys.stdin)
server = {"model": given["url"], "token": given["key"]}
texts: Any = [text for text in given["texts"] if text]  # in this dialect, an empty text is an error


async def at_once() -> list[list[float]]:
    async with AsyncInferenceClient(**server) as client:
        return (await client.feature_extraction(texts)).tolist()  # type: ignore[no-any-return]


client = InferenceClient(**server)
found = {
    "documents": client.feature_extraction(texts).tolist(),
    "one": client.feature_extraction(texts[0], normalize=True, truncate=True, truncation_direction="right").tolist(),
    "async": asyncio.run(at_once()),
}
cosines = client.sentence_similarity(texts[0], other_sentences=texts)
print(json.dumps({"vectors": found, "cosines": cosines}))
