"""What the package mteb asks of a model, for `Engine`: `mteb.evaluate(Engine("model.onnx"), tasks)`.

mteb calls `encode` with batches of a data loader and the task they are from, and files results
under the model's card. `engine` is an `Engine`, which imports this module.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

__all__ = ["encode_task", "model_meta"]


def model_meta(engine: Any) -> Any:
    """The model's card. Other weights, settings or precision are another revision of it."""
    try:
        models = import_module("mteb.models")
    except ImportError:  # as for any attribute that is not there, so that hasattr can tell
        raise AttributeError("mteb_model_meta needs the package mteb: pip install mteb") from None
    manifest = engine.manifest
    facts = {
        "name": f"sbert-infer/{manifest.name}",
        "revision": _revision(engine),
        "max_tokens": engine.max_seq_length,
        "embed_dim": engine.get_embedding_dimension(),
    }
    return models.ModelMeta.create_empty(overwrites=facts)


def _revision(engine: Any) -> str:
    """Different wherever vectors may be: mteb files results under it, and does not evaluate a revision twice."""
    manifest = engine.manifest
    settings = [engine.get_embedding_dimension(), engine.max_seq_length, engine.similarity_fn_name]
    settings += [manifest.pooling, sorted(engine.prompts.items()), engine.default_prompt_name, manifest.normalized]
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    return f"{manifest.weights_sha256[:12]}-{manifest.precision}-{digest[:8]}"


def encode_task(engine: Any, inputs: Any, task: Any, prompt_type: Any, **options: Any) -> Any:
    """Encode the texts of a data loader as mteb does with a SentenceTransformer: with the prompt that fits the task."""
    texts = [text for batch in inputs for text in batch["text"]]
    name = import_module("mteb.models.abs_encoder").get_prompt_name(engine.prompts, task, prompt_type)
    role = getattr(prompt_type, "value", prompt_type)
    encode = {"query": engine.encode_query, "document": engine.encode_document}.get(role, engine.encode)
    return encode(texts, name, **options)
