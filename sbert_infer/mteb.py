"""What the package mteb asks of a model, for `Engine`: `mteb.evaluate(Engine("model.onnx"), tasks)`.

mteb calls `encode` with batches of a data loader and the task they are from, and files results under the model's card.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["encode_task", "model_meta"]


def model_meta(engine: Engine) -> Any:
    """The model's card. Other weights, or another precision, are another revision of it."""
    try:
        models = import_module("mteb.models")
    except ImportError:  # as for any attribute that is not there, so that hasattr can tell
        raise AttributeError("mteb_model_meta needs the package mteb: pip install mteb") from None
    manifest = engine.manifest
    facts = {
        "name": f"sbert-infer/{manifest.name}",
        "revision": f"{manifest.weights_sha256[:12]}-{manifest.precision}",
        "max_tokens": engine.max_seq_length,
        "embed_dim": engine.get_embedding_dimension(),
    }
    return models.ModelMeta.create_empty(overwrites=facts)


def encode_task(engine: Engine, inputs: Any, task: Any, prompt_type: Any, **options: Any) -> Any:
    """Encode the texts of a data loader as mteb does with a SentenceTransformer: with the prompt that fits the task."""
    texts = [text for batch in inputs for text in batch["text"]]
    name = import_module("mteb.models.abs_encoder").get_prompt_name(engine.prompts, task, prompt_type)
    role = getattr(prompt_type, "value", prompt_type)
    encode = {"query": engine.encode_query, "document": engine.encode_document}.get(role, engine.encode)
    return encode(texts, name, **options)
