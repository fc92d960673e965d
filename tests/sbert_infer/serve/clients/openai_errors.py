"""openai: which exception each refusal becomes. Each is given as the arguments of a call."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import openai

given = json.load(sys.stdin)


def refused(call: dict[str, Any]) -> dict[str, Any]:
    tries: list[float] = []
    key, max_retries = call.pop("key", given["key"]), call.pop("max_retries", 2)
    client = openai.OpenAI(base_url=given["url"] + "/v1", api_key=key, max_retries=max_retries)
    # A hook of the HTTP client sees each try, retries included.
    client._client.event_hooks = {"response": [lambda response: tries.append(time.monotonic())]}
    try:
        client.embeddings.create(**{"model": given["model"], "input": "a", **call})
    except openai.APIStatusError as error:
        body: Any = error.body
        waits = [after - before for before, after in itertools.pairwise(tries)]
        told = {name: error.response.headers.get(name) for name in ("retry-after", "retry-after-ms")}
        return {"type": type(error).__name__, "body": body, "tries": len(tries), "waits": waits, **told}
    return {"type": None}


print(json.dumps([refused(call) for call in given["calls"]]))
