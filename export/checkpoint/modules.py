"""The modules after the transformer as their files describe them: specs, readers and checks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor

# Old spelling -> our name, in the order of concatenation in the old layout.
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES = {"mean_sqrt_len_tokens": "mean_sqrt_len"} | {mode: mode for mode in _LEGACY_MODES.values()}

DIM_KEYS = ("embedding_dimension", "word_embedding_dimension")  # the new spelling, and the old

# Activations that a checkpoint may name, all built without arguments. Dotted paths are never
# imported.
ACTIVATIONS = frozenset(
    {
        *("CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU"),
        *("LogSigmoid", "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign"),
        *("Tanh", "Tanhshrink"),
    }
)
_ACTIVATION_PATH = re.compile(r"torch\.nn\.(?:modules\.(?:activation|linear)\.)?(\w+)")

Problems: TypeAlias = list[str]
Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class PoolingSpec:
    """Token vectors to one vector; several modes are concatenated in the given order."""

    dim: int  # width of a token vector
    modes: tuple[str, ...]  # of: cls, max, mean, mean_sqrt_len, weightedmean, lasttoken
    include_prompt: bool = True


@dataclass(frozen=True)
class DenseSpec:
    """A linear layer with activation and optionally a residual, projected if widths differ."""

    path: Path
    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"  # a name in `torch.nn`
    residual: bool = False

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor in the weight file."""
        matrix = (self.out_features, self.in_features)
        shapes: Shapes = {"linear.weight": matrix}
        if self.bias:
            shapes["linear.bias"] = (self.out_features,)
        if self.residual and self.in_features != self.out_features:
            shapes["residual.weight"] = matrix
        return shapes


@dataclass(frozen=True)
class LayerNormSpec:
    """Layer normalisation of the sentence vector."""

    path: Path
    dim: int

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor in the weight file."""
        return {"norm.weight": (self.dim,), "norm.bias": (self.dim,)}


@dataclass(frozen=True)
class NormalizeSpec:
    """Scaling to unit length."""


@dataclass(frozen=True)
class WeightedLayerPoolingSpec:
    """Token vectors as the weighted mean of the transformer's layers, from `layer_start` on."""

    path: Path
    dim: int
    layer_start: int
    num_hidden_layers: int

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor in the weight file."""
        return {"layer_weights": (self.num_hidden_layers + 1 - self.layer_start,)}


ModuleSpec: TypeAlias = PoolingSpec | DenseSpec | LayerNormSpec | NormalizeSpec | WeightedLayerPoolingSpec


def output_dim(modules: Iterable[ModuleSpec]) -> int:
    """Width of the last module's vectors."""
    dim = 0
    for spec in modules:
        if isinstance(spec, PoolingSpec):
            dim = spec.dim * len(spec.modes)
        elif isinstance(spec, DenseSpec):
            dim = spec.out_features
    return dim


# -------------------------------------------------------------------------------------------------
# reading


def read_json(path: Path, name: str, problems: Problems, expected: type = dict) -> Any:
    """The content of a JSON file; an empty `expected` after a problem."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{name} is not readable as JSON: {error}")
    else:
        if isinstance(content, expected):
            return content
        wanted = "an object" if expected is dict else "a list"
        problems.append(f"{name} must hold {wanted}, not {type(content).__name__}")
    return expected()


def peek_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none or it can't be read."""
    content: dict[str, Any] = read_json(file, file.name, [])
    return content


def unknown_keys(config: dict[str, Any], known: Iterable[str], name: str, problems: Problems) -> None:
    """Report each unknown key, since it could change the vectors."""
    problems += [f"{name}: unknown key '{key}' (= {config[key]!r})" for key in config if key not in set(known)]


def read_module(
    kind: str, folder: Path, name: str, problems: Problems, *, feature: str = "sentence_embedding"
) -> ModuleSpec | None:
    """Read the module of class `kind` in `folder`, called `name` in messages.

    `feature` is the feature that it has to read and write. None for Dropout and after a problem.
    """
    before, file, shown = len(problems), folder / "config.json", f"{name}/config.json"
    may_lack = kind in ("Normalize", "Dropout")  # Normalize has had a config since it can name its input
    config = {} if may_lack and not file.is_file() else read_json(file, shown, problems)
    if len(problems) > before:
        return None
    spec = _READERS[kind](config, folder, shown, problems)
    if kind in ("Dense", "Normalize"):
        _check_features(config, feature, shown, problems)
    if len(problems) > before:
        return None
    if isinstance(spec, DenseSpec | LayerNormSpec | WeightedLayerPoolingSpec):
        check_weights(spec, name, problems)
    return spec


def positive(config: dict[str, Any], keys: tuple[str, ...], name: str, problems: Problems, least: int = 1) -> int:
    """The integer under the first of `keys` (the new spelling, then the old) that is set."""
    value = next((config[key] for key in keys if key in config), None)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    problems.append(f"{name}: '{keys[0]}' must be an integer of at least {least}, not {value!r}")
    return least


def _read_pooling(config: dict[str, Any], folder: Path, name: str, problems: Problems) -> PoolingSpec:
    unknown_keys(config, (*DIM_KEYS, "pooling_mode", "include_prompt", *_LEGACY_MODES), name, problems)
    legacy = [mode for key, mode in _LEGACY_MODES.items() if config.get(key)]
    named = config.get("pooling_mode", legacy or "mean")
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or not modes:
        problems.append(f"{name}: 'pooling_mode' must be a name or a list of names, not {named!r}")
        modes = []
    problems += [
        f"{name}: unknown pooling mode {mode!r} (known: {', '.join(_LEGACY_MODES.values())})"
        for mode in modes
        if not isinstance(mode, str) or mode not in _MODES
    ]
    dim = positive(config, DIM_KEYS, name, problems)
    return PoolingSpec(
        dim, tuple(_MODES.get(str(mode), "") for mode in modes), bool(config.get("include_prompt", True))
    )


def _read_dense(config: dict[str, Any], folder: Path, name: str, problems: Problems) -> DenseSpec:
    known = ("in_features", "out_features", "bias", "activation_function", "use_residual")
    unknown_keys(config, (*known, *_FEATURES), name, problems)
    path = config.get("activation_function", "torch.nn.Tanh")
    match = _ACTIVATION_PATH.fullmatch(str(path))
    activation = match[1] if match else ""
    if activation not in ACTIVATIONS:
        problems.append(
            f"{name}: unsupported activation function {path!r} (supported: {', '.join(sorted(ACTIVATIONS))})"
        )
    return DenseSpec(
        path=folder,
        in_features=positive(config, ("in_features",), name, problems),
        out_features=positive(config, ("out_features",), name, problems),
        bias=bool(config.get("bias", True)),
        activation=activation,
        residual=bool(config.get("use_residual", False)),
    )


def _read_layer_norm(config: dict[str, Any], folder: Path, name: str, problems: Problems) -> LayerNormSpec:
    unknown_keys(config, ("dimension",), name, problems)
    return LayerNormSpec(folder, positive(config, ("dimension",), name, problems))


def _read_normalize(config: dict[str, Any], folder: Path, name: str, problems: Problems) -> NormalizeSpec:
    unknown_keys(config, _FEATURES, name, problems)
    return NormalizeSpec()


def _read_layer_pooling(
    config: dict[str, Any], folder: Path, name: str, problems: Problems
) -> WeightedLayerPoolingSpec:
    unknown_keys(config, (*DIM_KEYS, "layer_start", "num_hidden_layers"), name, problems)
    config = {"layer_start": 4, "num_hidden_layers": 12} | config  # the defaults of sentence-transformers
    layer_start = positive(config, ("layer_start",), name, problems, least=0)
    num_hidden_layers = positive(config, ("num_hidden_layers",), name, problems)
    if layer_start > num_hidden_layers:
        problems.append(f"{name}: 'layer_start' is {layer_start}, but there are {num_hidden_layers} layers")
    return WeightedLayerPoolingSpec(folder, positive(config, DIM_KEYS, name, problems), layer_start, num_hidden_layers)


def _read_dropout(config: dict[str, Any], folder: Path, name: str, problems: Problems) -> None:
    unknown_keys(config, ("dropout",), name, problems)  # the identity at inference


_FEATURES = ("module_input_name", "module_output_name")
_READERS: dict[str, Callable[[dict[str, Any], Path, str, Problems], ModuleSpec | None]] = {
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
    "WeightedLayerPooling": _read_layer_pooling,
    "Dropout": _read_dropout,
}
SUPPORTED = tuple(_READERS)


def _check_features(config: dict[str, Any], feature: str, name: str, problems: Problems) -> None:
    """Report a module that reads or writes anything but `feature`."""
    for key in _FEATURES:
        if config.get(key) not in (None, feature):
            problems.append(f"{name}: '{key}' is {config[key]!r}; only '{feature}' is supported")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a small module, from safetensors or `.bin`; raises a readable ValueError."""
    safe, legacy = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.is_file():
            return load_file(safe)
        if legacy.is_file():  # weights_only: runs no code from the file
            weights: dict[str, Tensor] = torch.load(legacy, map_location="cpu", weights_only=True)
            return weights
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).partition("\n")[0]
        file = safe if safe.is_file() else legacy
        raise ValueError(f"{file.name} can't be read safely as plain tensors: {reason}") from error
    raise ValueError("no weights (model.safetensors or pytorch_model.bin)")


def check_weights(
    spec: DenseSpec | LayerNormSpec | WeightedLayerPoolingSpec,
    name: str,
    problems: Problems,
    read: Callable[[Path], dict[str, Tensor]] = read_weights,
) -> None:
    """Report tensors that are missing, unknown or of another shape than `spec` says."""
    shapes = spec.shapes
    try:
        found = {key: tuple(tensor.shape) for key, tensor in read(spec.path).items()}
    except ValueError as error:
        problems.append(f"{name}: {error}")
        return
    problems += [f"{name}: tensor '{key}' is missing from the weights" for key in shapes.keys() - found.keys()]
    problems += [f"{name}: unknown tensor '{key}' in the weights" for key in found.keys() - shapes.keys()]
    for key in shapes.keys() & found.keys():
        if shapes[key] != found[key]:
            problems.append(f"{name}: tensor '{key}' has shape {list(found[key])}, expected {list(shapes[key])}")


def check_chain(modules: Iterable[tuple[str, ModuleSpec]], width: int, layers: int, problems: Problems) -> None:
    """Report modules whose order or width does not fit a transformer of `width` and `layers`."""
    pooled = False
    for name, spec in modules:
        on_tokens = isinstance(spec, PoolingSpec | WeightedLayerPoolingSpec)
        if on_tokens == pooled:
            problems.append(f"{name}: {'a second step on tokens after' if pooled else 'comes before'} Pooling")
            continue
        wanted = spec.in_features if isinstance(spec, DenseSpec) else getattr(spec, "dim", width)
        if wanted != width:
            problems.append(f"{name}: takes vectors of {wanted}, but is given {width}")
        if isinstance(spec, WeightedLayerPoolingSpec) and spec.num_hidden_layers != layers:
            problems.append(f"{name}: weighs {spec.num_hidden_layers} layers, but the transformer has {layers}")
        pooled = pooled or isinstance(spec, PoolingSpec)
        width = output_dim([spec]) or width
    if not pooled:
        problems.append("no Pooling module: the model gives token vectors, not a sentence vector")
