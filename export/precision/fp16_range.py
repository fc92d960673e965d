"""Whether FP16 can hold what a model computes, watched while the FP32 reference runs.

FP16 ends at 65504; larger numbers become infinity, and then NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from sbert_infer.errors import ExportError
from sbert_infer.export.reference.encoder import Reference

FP16_MAX = 65504.0
# Half of it: texts that were not tried may reach further, and activations this large come with
# rare outliers.
MAX_ACTIVATION = FP16_MAX / 2
# FP16 rounds a weight by 2^-11 of its value at most. A tensor that loses much more is too small.
MAX_WEIGHT_ERROR = 0.01

_OFFER = "export it in BF16, with --fp16 --bf16, or in FP32, without --fp16"


@contextmanager
def refuse_overflow(reference: Reference) -> Iterator[None]:
    """Raise `ExportError`, naming the layer, if FP16 can't hold the numbers of products and sums.

    Those are the transformer's, and those of Dense modules after pooling. Weights are checked at
    once, the activations of all texts that `reference` encodes within this context at its end.
    """
    after = reference.head.named_modules(prefix="head")
    dense = {name: module for name, module in after if isinstance(module, nn.Linear)}
    _check_weights(reference.encoder.named_parameters())
    _check_weights((f"{name}.weight", module.weight) for name, module in dense.items())
    layers = {name: module for name, module in reference.encoder.named_modules() if _computes(module)}
    peaks: dict[str, float] = {}
    hooks = [
        module.register_forward_hook(partial(_watch, name, peaks, 2 if name in dense else 3), with_kwargs=True)
        for name, module in {"the encoder": reference.encoder, **layers, **dense}.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    _check_peaks(peaks)


def _check_weights(parameters: Iterable[tuple[str, Tensor]]) -> None:
    for name, parameter in parameters:
        weight = parameter.detach()
        largest = float(weight.abs().max())
        if not largest <= FP16_MAX:
            raise ExportError(f"FP16 ends at {FP16_MAX:.0f}, and the weights {name} reach {largest:.4g}; {_OFFER}")
        lost = float(weight.half().float().sub_(weight).norm()) / (float(weight.norm()) or 1.0)
        if lost > MAX_WEIGHT_ERROR:
            raise ExportError(f"FP16 ends at 6e-08, and the weights {name} lose {lost:.0%} by that; {_OFFER}")


def _computes(module: nn.Module) -> bool:
    """Whether it is a layer, not a group of layers. Residual sums are seen as inputs of layers."""
    return next(module.children(), None) is None and not isinstance(module, (nn.Dropout, nn.Identity))


def _watch(
    name: str, peaks: dict[str, float], ndim: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
) -> None:
    """A hook that keeps the largest magnitudes of a module's inputs and outputs of `ndim`."""
    for side, values in (("input", [*args, *kwargs.values()]), ("output", _items(output))):
        place = f"the {side} of {name}"
        for tensor in _hidden_states(values, ndim):
            low, high = tensor.aminmax()
            peak = max(-float(low), float(high))
            peaks[place] = max(peaks.get(place, 0.0), math.inf if math.isnan(peak) else peak)


def _items(output: Any) -> Iterable[Any]:
    if isinstance(output, Tensor):
        return [output]
    return output.values() if isinstance(output, dict) else output


def _hidden_states(values: Iterable[Any], ndim: int) -> Iterator[Tensor]:
    """The tensors [batch, length, width], or [batch, width] after pooling; no mask has these."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == ndim:
            yield value


def _check_peaks(peaks: dict[str, float]) -> None:
    """Report the first place in order of computation: it causes the large numbers after it."""
    for place, peak in peaks.items():
        if peak > MAX_ACTIVATION:
            raise ExportError(
                f"FP16 ends at {FP16_MAX:.0f}, and {place} reaches {peak:.4g} (up to {MAX_ACTIVATION:.0f} is accepted);"
                f" {_OFFER}"
            )
