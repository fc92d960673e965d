"""The modules of a sparse encoder as their files describe them. Each is the last in its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from sbert_infer.export.checkpoint.modules import (
    DIM_KEYS,
    DenseSpec,
    ModuleSpec,
    PoolingSpec,
    Problems,
    Shapes,
    check_weights,
    positive,
    read_json,
    read_weights,
    unknown_keys,
)

SPARSE_MODULES = ("SpladePooling", "SparseAutoEncoder")
_STRATEGIES, _ACTIVATIONS = ("max", "sum"), ("relu", "log1p_relu")


@dataclass(frozen=True)
class SpladeSpec(PoolingSpec):
    """A masked language model's scores of each word of its vocabulary, pooled over the tokens."""

    activation: str = "relu"  # or log1p_relu, which takes the logarithm twice


@dataclass(frozen=True)
class PresenceSpec(PoolingSpec):
    """A weight for each word that a text contains, from a table (SparseStaticEmbedding)."""

    path: Path = Path()


@dataclass(frozen=True)
class AutoEncoderSpec(DenseSpec):
    """A wide layer after a dense encoder; only its largest outputs are kept."""

    active: int = 1  # number of outputs that are kept
    standardize: bool = False  # whether the input is scaled to mean 0 and variance 1

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor in use."""
        matrix = (self.out_features, self.in_features)
        return {"encoder.weight": matrix, "pre_bias": (self.in_features,), "latent_bias": (self.out_features,)}


def is_sparse(modules: Sequence[ModuleSpec]) -> bool:
    """Whether these modules give sparse vectors."""
    return bool(modules) and isinstance(modules[-1], SpladeSpec | PresenceSpec | AutoEncoderSpec)


def active_dims(modules: Sequence[ModuleSpec], wanted: int | None) -> int | None:
    """How many numbers of a vector may be nonzero: `wanted` in the settings, or as trained."""
    last = modules[-1] if modules else None
    return last.active if wanted is None and isinstance(last, AutoEncoderSpec) else wanted


def check_last(modules: Sequence[tuple[str, ModuleSpec]], problems: Problems) -> None:
    """Report a module that follows one with sparse vectors."""
    for (name, spec), (next_name, _) in pairwise(modules):
        if is_sparse([spec]):
            problems.append(f"{next_name}: comes after {name}, which must be the last module")


def read_sparse_module(
    kind: str, folder: Path, name: str, vocabulary: int | None, problems: Problems
) -> ModuleSpec | None:
    """Read the module of class `kind` in `folder`, called `name` in messages.

    `vocabulary` is the number of words that the language model scores, if known. None after a
    problem.
    """
    before = len(problems)
    config = read_json(folder / "config.json", f"{name}/config.json", problems)
    if len(problems) > before:
        return None
    spec: ModuleSpec
    if kind == "SpladePooling":
        spec = _read_splade(config, vocabulary, f"{name}/config.json", problems)
    else:
        spec = _read_auto_encoder(config, folder, name, problems)
    return spec if len(problems) == before else None


def _read_splade(config: dict[str, Any], vocabulary: int | None, name: str, problems: Problems) -> SpladeSpec:
    unknown_keys(config, ("pooling_strategy", "activation_function", "chunk_size", *DIM_KEYS), name, problems)
    strategy = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    for key, value, known in (
        ("pooling_strategy", strategy, _STRATEGIES),
        ("activation_function", activation, _ACTIVATIONS),
    ):
        if value not in known:
            problems.append(f"{name}: '{key}' must be {' or '.join(known)}, not {value!r}")
    width = next((config[key] for key in DIM_KEYS if config.get(key) is not None), None)
    return SpladeSpec(width or vocabulary or 1, (f"splade_{strategy}",), activation=activation)


def _read_auto_encoder(config: dict[str, Any], folder: Path, name: str, problems: Problems) -> AutoEncoderSpec:
    file, sizes, training = f"{name}/config.json", ("input_dim", "hidden_dim", "k"), ("k_aux", "dead_threshold")
    unknown_keys(config, (*sizes, *training, "normalize"), file, problems)
    config = {"hidden_dim": 512, "k": 8} | config  # the defaults of sentence-transformers
    width, hidden, active = (positive(config, (key,), file, problems) for key in sizes)
    standardize = bool(config.get("normalize", False))
    spec = AutoEncoderSpec(folder, width, hidden, False, "ReLU", False, min(active, hidden), standardize)
    check_weights(spec, name, problems, auto_encoder_weights)
    return spec


def auto_encoder_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors in use. Encoder and decoder share a weight, saved under either name or both."""
    weights = dict(read_weights(folder))
    shared = weights.pop("decoder.linear.weight", None)
    if shared is not None:
        weights.setdefault("encoder.weight", shared)
    weights.pop("stats_last_nonzero", None)  # which neurons are alive, for training only
    return weights
