"""How each contestant scores pairs of texts, for rerankers. Runs inside `worker.py`.

A loader returns a `Score`: a function of pairs, a batch size (None: the library's own default) and
a prompt (None: the model's default) that returns scores [pairs, labels]. They are taken before the
activation, which would hide differences between large scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[Any]
Spec = dict[str, Any]
Score = Callable[[list[list[str]], int | None, str | None], Scores]


def load_reranker(spec: Spec) -> Score:
    """Load `sbert_infer.Reranker` the ordinary way."""
    from sbert_infer import Reranker

    reranker = Reranker(spec["artifact"], device=spec.get("device"), on_truncate="ignore")

    def score(pairs: list[list[str]], batch_size: int | None, prompt: str | None) -> Scores:
        scores = reranker.predict(pairs, prompt=prompt, batch_size=batch_size, activation_fn="identity")
        return np.asarray(scores).reshape(len(pairs), -1)

    score.padding = lambda: reranker.last_stats.padding  # type: ignore[attr-defined]
    return score


def load_eager(spec: Spec) -> Score:
    """Load the eager PyTorch reference."""
    from sbert_infer.export.families.cross_encoder.checkpoint import read_cross_encoder
    from sbert_infer.export.families.cross_encoder.reference import load_pair_reference

    checkpoint = read_cross_encoder(
        spec["checkpoint"], max_length=spec.get("max_length"), trust_remote_code=spec.get("trust_remote_code", False)
    )
    reference = load_pair_reference(checkpoint)
    name = checkpoint.default_prompt_name
    default = checkpoint.prompts[name] if name else ""

    def score(pairs: list[list[str]], batch_size: int | None, prompt: str | None) -> Scores:
        before = default if prompt is None else prompt
        scores: Scores = reference.score([(before + left, right) for left, right in pairs], batch_size=batch_size or 32)
        return scores

    return score


def load_cross_encoder(spec: Spec) -> Score:
    """Load sentence-transformers' `CrossEncoder`."""
    from sentence_transformers import CrossEncoder
    from torch.nn import Identity

    model = CrossEncoder(
        spec["model"],
        device="cpu",
        max_length=spec["max_length"],
        trust_remote_code=spec.get("trust_remote_code", False),
    )

    def score(pairs: list[list[str]], batch_size: int | None, prompt: str | None) -> Scores:
        options: Spec = {"batch_size": batch_size} if batch_size else {}
        if prompt is not None:
            options["prompt"] = prompt
        scores = model.predict(pairs, show_progress_bar=False, activation_fn=Identity(), **options)
        return np.asarray(scores).reshape(len(pairs), -1)

    return score


def load_fake(spec: Spec) -> Score:
    """Load a stand-in for a library with wrong scores, for the benchmark's own tests."""
    right = load_reranker(spec)
    return lambda pairs, batch_size, prompt: right(pairs, batch_size, prompt) + spec["error"]


LOADERS: dict[str, Callable[[Spec], Score]] = {
    "engine": load_reranker,
    "eager": load_eager,
    "cross-encoder": load_cross_encoder,
    "fake": load_fake,
}
