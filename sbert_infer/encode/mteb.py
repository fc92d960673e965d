"""mteb's interface for `Engine`, as in `mteb.evaluate(Engine("model.onnx"), tasks)`.

mteb calls `encode` with a data loader and the task that it belongs to, and stores results under the
name and revision in the model card. Functions here take the engine as `Any`, since `Engine` imports
this module.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any


def model_meta(engine: Any) -> Any:
    """Return the model card. Its revision is the fingerprint, the precision, and the settings."""
    try:
        models = import_module("mteb.models")
    except ImportError:  # so that hasattr returns False
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
    """Return a revision that differs whenever the vectors may differ.

    mteb stores results by revision, and does not evaluate one twice.
    """
    settings = [engine.get_embedding_dimension(), engine.max_seq_length, engine.similarity_fn_name]
    settings += [sorted(engine.prompts.items()), engine.default_prompt_name, engine.max_active_dims]
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    return f"{engine.fingerprint.exact}-{engine.manifest.precision}-{digest[:8]}"


def encode_task(engine: Any, inputs: Any, task: Any, prompt_type: Any, **options: Any) -> Any:
    """Encode a data loader's texts with the task's prompt, as mteb does for SentenceTransformer."""
    texts = [text for batch in inputs for text in batch["text"]]
    name = import_module("mteb.models.abs_encoder").get_prompt_name(engine.prompts, task, prompt_type)
    role = getattr(prompt_type, "value", prompt_type)
    encode = {"query": engine.encode_query, "document": engine.encode_document}.get(role, engine.encode)
    return encode(texts, name, **options)
