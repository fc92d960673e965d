"""A plain FastAPI server around sentence-transformers, as a rival for `sbert-bench --serve`.

Standalone: needs fastapi, uvicorn and sentence-transformers, but not sbert_infer.
    python bench/inside/plain_server.py MODEL --port 8082
"""

from __future__ import annotations

import argparse
import base64
import importlib
from typing import Any


def make_app(model_name: str) -> Any:
    """Make an app with one encoding route, which FastAPI runs in a pool of threads."""
    fastapi: Any = importlib.import_module("fastapi")
    sentence_transformers: Any = importlib.import_module("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(model_name, device="cpu")
    app = fastapi.FastAPI()

    @app.get("/v1/models")  # type: ignore[untyped-decorator]
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model_name, "object": "model"}]}

    @app.post("/v1/embeddings")  # type: ignore[untyped-decorator]
    def embeddings(body: dict[str, Any]) -> dict[str, Any]:
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        vectors = model.encode(texts)
        if body.get("encoding_format") == "base64":
            encoded: list[Any] = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
        else:
            encoded = vectors.tolist()
        data = [{"object": "embedding", "index": place, "embedding": one} for place, one in enumerate(encoded)]
        return {"object": "list", "data": data, "model": model_name, "usage": {"prompt_tokens": 0, "total_tokens": 0}}

    return app


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="A plain FastAPI and sentence-transformers server.")
    parser.add_argument("model", help="folder or hub id of a checkpoint")
    parser.add_argument("--port", type=int, default=8082)
    arguments = parser.parse_args()
    uvicorn: Any = importlib.import_module("uvicorn")
    uvicorn.run(make_app(arguments.model), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
