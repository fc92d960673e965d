"""Facts about the checkpoint that need torch.

Computed in a worker with our own interpreter, so that the benchmark itself never loads torch.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Spec = dict[str, Any]  # `checkpoint`, `pairs` if it is a cross-encoder, `trust_remote_code`, `max_length`


def describe_checkpoint(spec: Spec) -> Spec:
    """Describe the checkpoint for the contestants' loaders."""
    from sbert_infer.export.checkpoint.checkpoint import weights_sha256
    from sbert_infer.export.checkpoint.modules import NormalizeSpec, PoolingSpec

    checkpoint = _read(spec)
    facts = {"model": str(checkpoint.path.resolve()), "weights_sha256": weights_sha256(checkpoint)}
    if spec["pairs"]:
        return facts
    others = [module for module in checkpoint.modules if not isinstance(module, (PoolingSpec, NormalizeSpec))]
    return {
        **facts,
        "pooling": "+".join(checkpoint.pooling.modes),
        "head": ", ".join(type(module).__name__.removesuffix("Spec") for module in others),
        "normalized": any(isinstance(module, NormalizeSpec) for module in checkpoint.modules),
        "dim": checkpoint.dim,
    }


def flops_polynomial(spec: Spec) -> list[float]:
    """Coefficients c, a, b of the operations for one text or pair of n tokens: c + a n + b n^2.

    Counted with eager attention, whose products PyTorch's counter recognises. Three lengths
    determine three coefficients.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    reference = load_reference(spec, attention="eager")
    longest = min(64, reference.checkpoint.max_length)
    lengths = sorted({max(1, longest // 4), max(2, longest // 2), max(3, longest)})
    counts = []
    for length in lengths:
        ids = torch.ones((1, length), dtype=torch.int64)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            reference(ids, torch.ones_like(ids))
        counts.append(counter.get_total_flops())
    fitted = np.linalg.solve(np.vander(np.array(lengths, float), 3, increasing=True), np.array(counts, float))
    coefficients: list[float] = fitted.tolist()
    return coefficients


def load_reference(spec: Spec, attention: Literal["sdpa", "eager"] = "sdpa") -> Any:
    """Load the eager PyTorch model, of a cross-encoder if `spec` has `pairs`."""
    from sbert_infer.export.families.cross_encoder.reference import load_pair_reference
    from sbert_infer.export.reference import encoder

    if not spec.get("pairs"):
        return encoder.load_reference(_read(spec), attention=attention)
    reference: Any = load_pair_reference(_read(spec))
    if attention == "eager":
        reference.encoder.set_attn_implementation(attention)
    return reference


def _read(spec: Spec) -> Any:
    from sbert_infer.export.checkpoint.reader import read_checkpoint
    from sbert_infer.export.families.cross_encoder.checkpoint import read_cross_encoder

    read: Any = read_cross_encoder if spec.get("pairs") else read_checkpoint
    code = spec.get("trust_remote_code", False)
    return read(spec["checkpoint"], max_length=spec.get("max_length"), trust_remote_code=code)
