"""langchain-openai: refused as it comes, since it sends token ids; with one setting, it works."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import distribution

import openai
from langchain_openai import OpenAIEmbeddings

# The vocabulary that tiktoken would fetch from the network comes with litellm.
os.environ["TIKTOKEN_CACHE_DIR"] = str(distribution("litellm").locate_file("litellm/litellm_core_utils/tokenizers"))

given = json.load(sys.stdin)
server = {"base_url": given["url"] + "/v1", "api_key": given["key"], "model": given["model"]}
texts = given["texts"]

refusal = None
try:
    OpenAIEmbeddings(**server).embed_documents(texts)
except openai.BadRequestError as error:
    refusal = str(error)

embeddings = OpenAIEmbeddings(**server, check_embedding_ctx_length=False)
found = {
    "documents": embeddings.embed_documents(texts),
    "queries": [embeddings.embed_query(text) for text in texts[:3]],
    "async": asyncio.run(embeddings.aembed_documents(texts)),
}
print(json.dumps({"vectors": found, "refusal": refusal}))
