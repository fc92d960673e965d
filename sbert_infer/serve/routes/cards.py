"""A model's card: what is served under a name, in words and numbers for /info and the live page."""

from __future__ import annotations

from sbert_infer.serve.models.served_model import Model
from sbert_infer.serve.wire.schemas import ModelCard

__all__ = ["card_of"]


def card_of(model: Model) -> ModelCard:
    """What there is to know of a model as it runs now."""
    manifest, info = model.engine.engine.manifest, model.engine.engine.info
    return ModelCard(
        name=model.name,
        kind=model.kind,
        names=model.names,
        file=model.path.name,
        ready=model.ready,
        precision=manifest.precision,
        backend=info["backend"],
        device=info["device"],
        architecture=manifest.architecture,
        pooling=list(manifest.pooling),
        dim=min(manifest.truncate_dim or manifest.dim, manifest.dim),
        max_length=info["max_length"],
        normalized=manifest.normalized,
        similarity=manifest.similarity,
        prompts=sorted(manifest.prompts),
        default_prompt_name=manifest.default_prompt_name,
        max_batch_tokens=model.max_batch_tokens,
        workers=info["workers"],
        weights_sha256=manifest.weights_sha256,
        parity=dict(manifest.parity),
        versions=dict(manifest.versions),
    )
